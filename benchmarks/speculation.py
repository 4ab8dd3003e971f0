"""Generation with draft tokens against generation without: fixed lengths and `auto`, in one process, in turns.

Every arm has an engine of its own, which keeps what it knows from rollout to rollout: the first has siblings alone, the
later ones what was said before. All arms draw the same samples, which is checked; the noise of a rollout is its own.
Times are CPU seconds of the process (one thread), for other work on the machine must not count, in brackets of what
plain generation took in the same turn; the median of the turns.

    chat    questions: free text, of which little is known before
    copy    a text that is to be said again
    code    a function that is to be written again with type hints
    sums    of two numbers, explained

`off again` is a second engine without drafts: what it differs by from the first is the machine's.

The *ideal* is the fixed length, from none on, that would be fastest by the cost of a step that `auto` has fitted and by
how often the drafts of the longest fixed length were accepted, place by place, if looking up took no time.

    python benchmarks/speculation.py --running 1 4 8 32          # SmolLM2-135M-Instruct, temperature 1
    python benchmarks/speculation.py --task copy
    python benchmarks/speculation.py --losses 0.05 0.1           # `auto` where more than two percent may be lost
    python benchmarks/speculation.py --draft-model FOLDER        # `auto` with a draft model, and a fixed length with it
    python benchmarks/speculation.py --tiny --repeats 1          # does the benchmark itself work?
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from random_llama import word_tokenizer, write_llama

from plait.data.records import Prompt, Sample
from plait.generation.engine import Engine, drain
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.generation.speculator import Speculator
from plait.generation.steady_drafts import WhereSteady
from plait.kernels.noise import NoiseKey
from plait.models.language_loading import load_model
from plait.models.language_model import LanguageModel
from plait.speculation.counts import SOURCES

CHAT = (
    "Write a short story about a fox who learns to swim.",
    "Explain how a bicycle stays upright.",
    "If a train travels 60 miles in 1.5 hours, what is its average speed? Explain step by step.",
    "List five healthy breakfast ideas with one sentence each.",
    "Summarize the water cycle for a child.",
    "Write a polite email asking for a day off.",
    "Natalia sold clips to 48 of her friends in April, and half as many in May. How many did she sell altogether?",
    "Write a Python function that reverses a string and explain it.",
)
TEXTS = (
    "The old lighthouse stands on the northern cliff, where the wind never rests. Every evening its keeper climbs the "
    "narrow stairs, lights the lamp and writes the weather into a book that his grandmother began.",
    "Mix the flour with the sugar and a pinch of salt. Add the eggs one after another, then the warm milk, and let the "
    "dough rest for half an hour before you bake thin pancakes in a hot pan with a little butter.",
    "Our library opens at nine in the morning and closes at seven. On Saturdays it closes at two. Children may borrow "
    "five books for three weeks; grown-ups may borrow ten. Lost books must be paid for.",
    "The river rises in the mountains, passes three lakes and a gorge, and reaches the sea after four hundred miles. "
    "In spring it carries so much water that the meadows near the coast stand under it for weeks.",
)
FUNCTIONS = (
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n",
    "def count(words):\n    table = {}\n    for word in words:\n        table[word] = table.get(word, 0) + 1\n"
    "    return table\n",
    "def clamp(number, low, high):\n    if number < low:\n        return low\n"
    "    if number > high:\n        return high\n    return number\n",
    "def unique(items):\n    seen = set()\n    kept = []\n    for item in items:\n        if item not in seen:\n"
    "            seen.add(item)\n            kept.append(item)\n    return kept\n",
)
SUMS = ((12, 35), (48, 27), (63, 18), (71, 26), (39, 44), (85, 13), (57, 29), (22, 68))
TASKS = {
    "chat": CHAT,
    "copy": tuple(f"Repeat the following text word for word, and say nothing else.\n\n{text}" for text in TEXTS),
    "code": tuple(f"Write this function again with type hints.\n\n```python\n{text}```" for text in FUNCTIONS),
    "sums": tuple(f"What is {a} + {b}? Explain how you add the tens and the ones." for a, b in SUMS),
}


def requests(model: LanguageModel, options: argparse.Namespace, running: int, rollout: int) -> list[Request]:
    """Prompts of `running` samples in all: groups of up to 8."""
    group = min(running, 8)
    sampling = Sampling(temperature=options.temperature, max_tokens=options.tokens)
    texts, asked = TASKS[options.task], []
    for uid in range(max(1, running // group)):
        text = texts[uid % len(texts)]
        prompt = Prompt(uid, text, prompt_ids_of(model, text))
        asked.append(Request(prompt, group, sampling, NoiseKey(0, rollout)))
    return asked


def prompt_ids_of(model: LanguageModel, text: str) -> tuple[int, ...]:
    """The tokens of what a user says, by the model's chat template if it has one."""
    if model.tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": text}]
        text = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tuple(model.tokenizer(text, add_special_tokens=False)["input_ids"])


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
    keys["off again"] = {"speculation": "off"}
    for loss in options.losses:
        keys[f"auto, may lose {loss:g}"] = {"speculation": "auto", "speculation_loss": loss}
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
        said: dict[str, dict[str, tuple[int, ...]]] = {}
        turn = rollout % len(arms)
        for arm in (*arms[turn:], *arms[:turn]):
            taken, samples = timed(engines[arm], asked)
            seconds[arm].append(taken)
            said[arm] = {uid: sample.token_ids for uid, sample in samples.items()}
        assert all(mine == said["off"] for mine in said.values()), "an arm says something else"
    tokens = sum(map(len, said["off"].values()))
    print(f"\n{running} running, {tokens} tokens in the last rollout; seconds (times as fast as plain)\n")
    print("| drafted | siblings alone | with history | tokens a step | accepted | steps with drafts | looking up |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for arm in arms:
        print(row(arm, engines[arm], seconds, options.repeats))
    if isinstance(auto := engines["auto"].speculates, WhereSteady) and auto.own is None:
        print("\n`auto` has drafted nothing: no step computes a row alike whatever stands beside it", flush=True)
    elif options.lengths and options.repeats:
        ideal, length = ideal_of(engines[str(max(options.lengths))], engines["auto"], asked)
        speed = median(plain / mine for plain, mine in zip(seconds["off"][1:], seconds["auto"][1:], strict=True))
        print(f"\nideal: {ideal:.2f}x with {length} tokens; `auto` has {speed / ideal:.0%} of it", flush=True)


def ideal_of(longest: Engine, auto: Engine, asked: Sequence[Request]) -> tuple[float, int]:
    """(times as fast as plain generation, the length): see the module.

    Args:
        longest: the engine of the longest fixed length; auto: that with the fitted cost; asked: of a rollout.
    """
    counts, speculator = longest.speculation, auto.speculates
    speculator = speculator.own if isinstance(speculator, WhereSteady) else speculator
    assert counts is not None, "it drafts"
    assert isinstance(speculator, Speculator), "it has fitted what a step takes"
    if not counts.rows:
        return 1.0, 0
    running = sum(request.num_samples for request in asked)
    context = sum(
        request.num_samples * (len(request.prompt.token_ids) + request.sampling.max_tokens / 2) for request in asked
    )
    often, with_draft = counts.steps_with_drafts / counts.steps, counts.tried_at[0] / counts.rows
    gained = np.concatenate([np.zeros(1), np.cumsum(counts.accepted_at / counts.rows)])
    lengths = np.arange(np.count_nonzero(counts.tried_at) + 1)
    seconds = speculator.speculation.cost.seconds(running * (1 + with_draft * lengths), context)
    speeds = (1 + often * gained[: len(lengths)]) / (1 - often + often * seconds / seconds[0])
    return float(speeds.max()), int(speeds.argmax())


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
    shares = f"{rate:.0%} ({of}) | {found.get('drafted_steps', 0.0):.0%} | {looking:.1%}"
    return f"| {arm} | {first} | {later} | {length:.2f} | {shares} |"


def tiny_model(folder: Path) -> LanguageModel:
    """A random one of two layers."""
    write_llama(folder, word_tokenizer(60), hidden=32, intermediate=64, positions=128)
    return load_model(str(folder), dtype="float32")


def main() -> None:
    """Read the options and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--task", choices=tuple(TASKS), default="chat")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 4, 8, 32], help="samples that run at a time")
    parser.add_argument("--lengths", type=int, nargs="*", default=[1, 2, 4], help="fixed numbers of draft tokens")
    parser.add_argument("--tokens", type=int, default=128, help="of a response at most")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5, help="rollouts after the first")
    parser.add_argument(
        "--losses", type=float, nargs="*", default=[], help="arms with such a sampling.speculation_loss"
    )
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
        dtype = str(model.dtype).removeprefix("torch.")
        print(f"{name}, {options.task}, {dtype}, temperature {options.temperature:g}, 1 thread")
        for running in options.running:
            compare(model, options, running)


if __name__ == "__main__":
    main()
