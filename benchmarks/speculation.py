"""Generation with guessed tokens against generation without: fixed lengths and `auto`, in one process, in turns.

Every arm has an engine of its own, which keeps what it knows from rollout to rollout: the first has siblings alone, the
later ones what was said before. All arms draw the same samples, which is checked; the noise of a rollout is its own.
Times are CPU seconds of the process (one thread), for other work on the machine must not count, in brackets of what
plain generation took in the same turn; the median of the turns.

    python benchmarks/speculation.py --running 1 4 8 32          # SmolLM2-135M-Instruct, temperature 1
    python benchmarks/speculation.py --draft-model FOLDER        # `auto` with a draft model, and a fixed length with it
    python benchmarks/speculation.py --tiny --repeats 1          # does the benchmark itself work?
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from random_llama import word_tokenizer, write_llama

from plait.data.records import Prompt, Sample
from plait.generation.engine import Engine, drain
from plait.generation.request import Request
from plait.generation.settings import Sampling, SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.models.language_loading import load_model
from plait.models.language_model import LanguageModel
from plait.speculation.counts import SOURCES

PROMPTS = (
    "Write a short story about a fox who learns to swim.",
    "Explain how a bicycle stays upright.",
    "If a train travels 60 miles in 1.5 hours, what is its average speed? Explain step by step.",
    "List five healthy breakfast ideas with one sentence each.",
    "Summarize the water cycle for a child.",
    "Write a polite email asking for a day off.",
    "Natalia sold clips to 48 of her friends in April, and half as many in May. How many did she sell altogether?",
    "Write a Python function that reverses a string and explain it.",
)


def requests(model: LanguageModel, options: argparse.Namespace, running: int, rollout: int) -> list[Request]:
    """Prompts of `running` samples in all: groups of up to 8."""
    group = min(running, 8)
    sampling = Sampling(temperature=options.temperature, max_tokens=options.tokens)
    found = []
    for uid in range(max(1, running // group)):
        text = PROMPTS[uid % len(PROMPTS)]
        if model.tokenizer.chat_template is not None:
            messages = [{"role": "user", "content": text}]
            text = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        token_ids = tuple(model.tokenizer(text, add_special_tokens=False)["input_ids"])
        found.append(Request(Prompt(uid, text, token_ids), group, sampling, NoiseKey(0, rollout)))
    return found


def timed(engine: Engine, asked: list[Request]) -> tuple[float, dict[str, Sample]]:
    """CPU seconds of a rollout, less those of packing weights; its samples by uid."""
    for request in asked:
        engine.add(request)
    engine.state.forward.prepare(engine.state.flight.longest_left)
    began = time.process_time()
    samples = {sample.uid: sample for sample in drain(engine)}
    return time.process_time() - began, samples


def compare(model: LanguageModel, options: argparse.Namespace, running: int) -> None:
    """Print a table of the arms for so many running samples."""
    hows: list[Any] = ["off", *options.lengths, "auto"]
    keys: dict[str, dict[str, Any]] = {str(how): {"speculation": how} for how in hows}
    if options.draft_model is not None:
        for how in (*options.lengths[-1:], "auto"):
            keys[f"{how}, draft model"] = {"speculation": how, "draft_model": options.draft_model}
    arms = list(keys)
    engines = {arm: Engine(model, SamplingSettings(max_running=running, **keys[arm])) for arm in arms}
    for how in ("off", 1):  # kernels are loaded
        timed(
            Engine(model, SamplingSettings(max_running=running, speculation=how)), requests(model, options, running, 0)
        )
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for rollout in range(1 + options.repeats):
        asked = requests(model, options, running, rollout)
        plain: dict[str, Sample] = {}
        for arm in arms if rollout % 2 == 0 else [arms[0], *reversed(arms[1:])]:
            taken, samples = timed(engines[arm], asked)
            seconds[arm].append(taken)
            plain = plain or samples
            said = [(sample.token_ids, samples[uid].token_ids) for uid, sample in plain.items()]
            assert all(mine == theirs for mine, theirs in said), f"{arm} says something else"
    tokens = sum(len(sample.token_ids) for sample in plain.values())
    print(f"\n{running} running, {tokens} tokens in the last rollout; seconds (times as fast as plain)\n")
    print("| guessed | siblings alone | with history | tokens a step | came true | steps with guesses | looking up |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for arm in arms:
        print(row(arm, engines[arm], seconds, options.repeats))


def row(arm: str, engine: Engine, seconds: dict[str, list[float]], repeats: int) -> str:
    """Of the table."""
    ratios = [plain / mine for plain, mine in zip(seconds["off"], seconds[arm], strict=True)]
    first = f"{seconds[arm][0]:.2f} ({ratios[0]:.2f}x)"
    later = f"{median(seconds[arm][1:]):.2f} ({median(ratios[1:]):.2f}x)" if repeats else ""
    counts = engine.speculation
    if counts is None:
        return f"| {arm} | {first} | {later} | | | | |"
    found = counts.figures()
    length, rate = found.get("mean_acceptance_length", 1.0), found.get("draft_acceptance_rate", 0.0)
    of = ", ".join(
        f"{name} {found[f'acceptance_of_{name}']:.0%}" for name in SOURCES if f"acceptance_of_{name}" in found
    )
    looking = found["drafting_s"] / sum(seconds[arm])
    shares = f"{rate:.0%} ({of}) | {found['drafted_steps']:.0%} | {looking:.1%}"
    return f"| {arm} | {first} | {later} | {length:.2f} | {shares} |"


def tiny_model(folder: Path) -> LanguageModel:
    """A random one of two layers."""
    write_llama(folder, word_tokenizer(60), hidden=32, intermediate=64, positions=128)
    return load_model(str(folder), dtype="float32")


def main() -> None:
    """Read the options and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 4, 8, 32], help="samples that run at a time")
    parser.add_argument("--lengths", type=int, nargs="*", default=[1, 2, 4], help="fixed numbers of guessed tokens")
    parser.add_argument("--tokens", type=int, default=128, help="of a response at most")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5, help="rollouts after the first")
    parser.add_argument("--draft-model", help="a folder or a hub id: arms with it, too")
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.tiny:
        options.running, options.tokens = [2], 20
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder)) if options.tiny else load_model(options.model, dtype=options.dtype)
        if options.tiny:
            options.draft_model = folder  # the policy itself: always right, and as slow
        name = "a tiny model" if options.tiny else options.model
        print(f"{name}, {str(model.dtype).removeprefix('torch.')}, temperature {options.temperature:g}, 1 thread")
        for running in options.running:
            compare(model, options, running)


if __name__ == "__main__":
    main()
