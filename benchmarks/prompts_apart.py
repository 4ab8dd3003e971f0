"""Prompts on a worker of their own, against two workers that compute prompts and samples alike.

    python benchmarks/prompts_apart.py                      # on two idle cores
    python benchmarks/prompts_apart.py --prompt-tokens 512 --response-tokens 64 --running 16
    python benchmarks/prompts_apart.py --tiny --repeats 1   # does the benchmark itself work?

Rollouts on two workers of one thread each, of a random model that is trained behind the last step only: the same
recipe, prompts and noise in both runs, so the same tokens up to rounding (the share of equal samples is told).

    together   `decode` on both workers: each computes its prompts and draws their samples
    apart      `prefill` on one, `decode` on the other

Printed of each length of prompts, medians over steps: seconds of generation; the longest step in which samples that run
get a token, which is how long prompts hold them up; seconds of a decode step, and samples in it; the share of the
rollout in which each worker computed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ending import ends_when_terminated
from placed.recipes import grpo_of
from placed.runs import Finished, RunFailed, run_alone
from random_llama import word_tokenizer, write_llama
from sides import positive

from plait.observe.run_log import read_rows
from plait.schedule.timeline import Span

VOCABULARY = 2000
BOTH = (0, 1)
WARM_UP = 1
PLACES: Mapping[str, Mapping[str, Sequence[int]]] = {
    "together": {"decode": BOTH},
    "apart": {"prefill": (1,), "decode": (0,)},
}

FLOW = """
def generated(prompts, actor, reward):
    samples = actor.generate(prompts)
    rewards = reward.score(samples)
    actor.train(samples, loss=policy_loss, after={after}, rewards=rewards)


def policy_loss(batch, rewards):
    return -batch.aggregate(rewards * batch.logprobs, "token-mean")
"""


@dataclass
class Measured:
    """Of each step that counts. tokens: of all samples"""

    generate_s: list[float] = field(default_factory=list)
    held_up_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    busy: list[tuple[float, ...]] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)

    def add(self, finished: Finished) -> None:
        for spans in finished.spans():
            mine = [span for span in spans if span.whole == "actor.generate"]
            begin, end = min(span.start_s for span in mine), max(span.end_s for span in mine)
            steps = [span for span in mine if span.kind == "DECODE" and span.drawn]
            self.generate_s.append(end - begin)
            self.held_up_s.append(_held_up_s(mine))
            self.decode_s.append(median(span.duration_s for span in steps))
            self.running.append(sum(span.samples for span in steps) / len(steps))
            computed = [sum(span.duration_s for span in mine if span.rank == rank) for rank in BOTH]
            self.busy.append(tuple(seconds / (end - begin) for seconds in computed))
        files = sorted((finished.run_dir / "samples").glob("step-*"))
        self.tokens = [(sample["uid"], sample["token_ids"]) for file in files for sample in read_rows(file)]


def _held_up_s(spans: Sequence[Span]) -> float:
    """The longest step between two decode steps of a worker, or itself one."""
    longest = 0.0
    for rank in BOTH:
        mine = sorted((span for span in spans if span.rank == rank), key=lambda span: span.start_s)
        decoding = [number for number, span in enumerate(mine) if span.kind == "DECODE"]
        if decoding:
            longest = max(longest, *(span.duration_s for span in mine[decoding[0] : decoding[-1] + 1]))
    return longest


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.tiny:
        options.prompt_tokens, options.response_tokens, options.prompts = [24], 8, 6
    with ends_when_terminated(), tempfile.TemporaryDirectory(prefix="plait-apart-") as name:
        folder = Path(name)
        _write_model(folder / "model", options)
        print(
            f"{options.prompts} prompts x {options.samples} samples, {options.running} at once; "
            f"responses of {options.response_tokens} tokens"
        )
        print(LINE.format(*HEADINGS))
        for prompt_tokens in options.prompt_tokens:
            try:
                report(prompt_tokens, compared(folder, prompt_tokens, options))
            except RunFailed as error:
                print(error, file=sys.stderr)
                return 1
    return 0


HEADINGS = ("prompt", "way", "generation s", "held up ms", "decode ms", "samples", "busy", "together / apart")
LINE = "{:>6}  {:<8}  {:>12}  {:>10}  {:>9}  {:>7}  {:>9}  {}"


def report(prompt_tokens: int, measured: Mapping[str, Measured]) -> None:
    seconds = {way: median(of.generate_s) for way, of in measured.items()}
    drawn = [of.tokens for of in measured.values()]
    same = sum(one == other for one, other in zip(*drawn, strict=True)) / len(drawn[0])
    for way, of in measured.items():
        busy = " ".join(f"{median(shares):.0%}" for shares in zip(*of.busy, strict=True))
        ratio = f"{seconds['together'] / seconds['apart']:.2f}, {same:.1%} equal" if way == "apart" else ""
        print(
            LINE.format(
                prompt_tokens,
                way,
                f"{seconds[way]:.2f}",
                f"{1e3 * median(of.held_up_s):.0f}",
                f"{1e3 * median(of.decode_s):.1f}",
                f"{median(of.running):.1f}",
                busy,
                ratio,
            ),
            flush=True,
        )


def compared(folder: Path, prompt_tokens: int, options: argparse.Namespace) -> dict[str, Measured]:
    """Both ways, by turns. Raises RunFailed."""
    measured = {way: Measured() for way in PLACES}
    for repeat in range(options.repeats):
        for way in PLACES:
            place = folder / f"{way}-{prompt_tokens}-{repeat}"
            measured[way].add(
                run_alone({"recipe": _recipe(folder, way, prompt_tokens, options), "launched": True}, place, WARM_UP)
            )
    return measured


def _recipe(folder: Path, way: str, prompt_tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    words = random.Random(prompt_tokens)
    prompts = [
        " ".join(f"w{words.randrange(2, VOCABULARY)}" for _ in range(prompt_tokens)) for _ in range(options.prompts)
    ]
    steps = WARM_UP + options.steps
    recipe = grpo_of(
        folder,
        str(folder / "model"),
        prompts,
        samples=options.samples,
        steps=steps,
        tokens=options.response_tokens,
    )
    recipe["sampling"] |= {"max_running": options.running, "max_prefill_tokens": options.prefill_tokens}
    (folder / "flow.py").write_text(FLOW.format(after=steps - 1))
    recipe |= {"algorithm": f"{folder}/flow.py:generated", "options": {}, "dtype": "float32"}
    return recipe | {"plan": str(_plan(folder, way))}


def _plan(folder: Path, way: str) -> Path:
    placements: list[dict[str, Any]] = [
        {"call": "actor.generate", "mode": mode, "ranks": list(ranks), "dp": len(ranks)}
        for mode, ranks in PLACES[way].items()
    ]
    placements.append({"call": "actor.train", "mode": "train", "ranks": list(BOTH), "dp": len(BOTH)})
    path = folder / f"{way}.json"
    record = {"format": "plait-plan", "version": 1, "name": way, "num_ranks": len(BOTH), "placements": placements}
    path.write_text(json.dumps(record))
    return path


def _write_model(folder: Path, options: argparse.Namespace) -> None:
    hidden, layers = (32, 2) if options.tiny else (options.hidden, options.layers)
    positions = max(options.prompt_tokens) + options.response_tokens + 8
    tokenizer = word_tokenizer(VOCABULARY)
    write_llama(
        folder,
        tokenizer,
        hidden=hidden,
        intermediate=4 * hidden,
        layers=layers,
        heads=8 if hidden > 32 else 4,
        positions=positions,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=positive, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--response-tokens", type=positive, default=64)
    parser.add_argument("--prompts", type=positive, default=16, help="of a step")
    parser.add_argument("--samples", type=positive, default=4, help="of each prompt")
    parser.add_argument("--running", type=positive, default=16, help="samples that a worker runs at once")
    parser.add_argument("--prefill-tokens", type=positive, default=4096, help="tokens of prompts in a step at most")
    parser.add_argument("--hidden", type=positive, default=256)
    parser.add_argument("--layers", type=positive, default=8)
    parser.add_argument("--steps", type=positive, default=2, help="that count, of a run")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--tiny", action="store_true", help="a random model of 32 dims: shows that it runs")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
