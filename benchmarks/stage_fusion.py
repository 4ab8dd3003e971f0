"""Generation and scoring on two workers of one thread: the last samples gathered by `auto`, at forced shares, or never.

    python benchmarks/stage_fusion.py                        # on two idle cores, about an hour and a half
    python benchmarks/stage_fusion.py --distributions 4      # half an hour
    python benchmarks/stage_fusion.py --tiny --repeats 1     # does the benchmark itself work?
    python benchmarks/stage_fusion.py --distributions 3 --first 3 --picture fused-step.svg    # of one, a picture too

The work: SmolLM2-135M-Instruct generates on two instances; a reference, a critic and a reward model of its size score
on the same two workers. Training is cut to one sample of each prompt, so that a step is generation and scoring.
Lengths: a response ends with each token by a chance that is the model's own, of a set of tokens that are drawn for
each distribution; so lengths are about geometric, with the means that are printed, cut at a limit. All kinds of one
distribution have the same lengths, token for token.

    off      samples end where they begin, and scoring begins when all have ended
    auto     the gate decides, from the second step on: the first, which shows it what things take, does not count
    0.25 …   samples are gathered when so large a share is unfinished

Seconds are from the beginning of generation to the end of the last score, the median of the steps. The ceiling is
computed from `off` of the same run: all that both workers did, evenly on both, but never less than the longest response
takes one token at a time. `of it` is how much of the ceiling's gain `auto` has; `auto` against `off` below 1 is a loss.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from placed.recipes import grpo, write_reward_model
from placed.runs import Finished, RunFailed, finish, start
from sides import positive, row

from plait.observe.run_log import read_rows
from plait.policy.fusion_gate import line_through
from plait.schedule.gantt import svg_gantts
from plait.schedule.timeline import Span, Timeline

WARM_UP = 1
MEANS = (0.08, 0.15, 0.25, 0.4, 0.6, 1.0)
"""Of the lengths before they are cut, as shares of the limit."""


@dataclass(frozen=True)
class Distribution:
    """ends: tokens that end a response; limit: of its tokens"""

    ends: tuple[int, ...]
    limit: int


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="plait-fusion-") as name:
        folder = Path(name)
        recipe = base_recipe(folder, options)
        try:
            seen = one_run(recipe | {"fusion": "off", "steps": 1}, folder / "free", Distribution((), options.tokens))
            counts = Counter(token for sample in samples_of(seen, first=1) for token in sample)
            kinds = ("off", "auto", *options.shares)
            numbered = list(enumerate(distributions(counts, options)))[options.first - 1 :]
            for number, distribution in numbered:
                runs: dict[str, list[Finished]] = {kind: [] for kind in kinds}
                for repeat in range(options.repeats):
                    for kind in kinds:
                        place = folder / f"{number}-{kind}-{repeat}"
                        runs[kind].append(one_run(recipe | {"fusion": _word(kind)}, place, distribution))
                report(number, distribution, runs)
                if options.picture is not None and number == options.first - 1:
                    draw(options.picture, runs)
        except RunFailed as error:
            print(error, file=sys.stderr)
            return 2
    return 0


def base_recipe(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    steps = WARM_UP + options.steps
    recipe = grpo(folder, is_tiny=options.tiny, prompts=options.prompts, samples=options.samples, steps=steps)
    plan = folder / "plan.json"
    calls = {"actor.generate": "decode", "actor.train": "train", "critic.train": "train"}
    calls |= dict.fromkeys(("ref.logprobs", "critic.values", "reward.score"), "score")
    where = {"ranks": [0, 1], "dp": 2}
    record = {"format": "plait-plan", "version": 1, "name": "two", "num_ranks": 2}
    record["placements"] = [{"call": call, "mode": mode, **where} for call, mode in calls.items()]
    record["policies"] = [{"name": "fusion", "settings": {}}]
    plan.write_text(json.dumps(record))
    flow = Path(__file__).parent / "placed" / "fusion_flow.py"
    return recipe | {
        "algorithm": f"{flow}:scored",
        "options": {},
        "reward": {"model": write_reward_model(recipe["model"], folder / "reward")},
        "critic": {"optimizer": {"learning_rate": 1e-12}},
        "optimizer": {"learning_rate": 1e-12},
        "plan": str(plan),
        "micro_batch_tokens": options.micro_batch_tokens,
    }


def distributions(counts: Counter[int], options: argparse.Namespace) -> list[Distribution]:
    """Sets of tokens that are drawn so often together that lengths have the means."""
    total = sum(counts.values())
    drawn = []
    for number in range(options.distributions):
        draw = random.Random(number)
        limit = options.tokens if number < len(MEANS) else options.tokens // 2
        wanted, share = 1.0 / (MEANS[number % len(MEANS)] * limit), 0.0
        ends: list[int] = []
        tokens = sorted(counts)
        draw.shuffle(tokens)
        for token in tokens:
            if share + counts[token] / total <= 1.2 * wanted:
                ends.append(token)
                share += counts[token] / total
            if share >= wanted:
                break
        drawn.append(Distribution(tuple(ends), limit))
    return drawn


def one_run(recipe: dict[str, Any], place: Path, distribution: Distribution) -> Finished:
    sampling = {
        "max_response_tokens": distribution.limit,
        "stop_token_ids": list(distribution.ends),
        "max_running": 256,
    }
    job = {"recipe": recipe | {"sampling": sampling}, "launched": True}
    return finish(start(job, place, threads=1), place, WARM_UP)


def samples_of(run: Finished, *, first: int) -> list[list[int]]:
    """Token ids of the responses from a step on."""
    files = sorted((run.run_dir / "samples").glob("step-*.jsonl"))[first - 1 :]
    return [row["token_ids"] for file in files for row in read_rows(file)]


def seconds_of(spans: Sequence[Span]) -> float:
    """From the beginning of generation to the end of the last score."""
    mine = [span for span in spans if _stage(span)]
    return max(span.end_s for span in mine) - min(span.start_s for span in mine)


def ceiling_of(run: Finished) -> float:
    """Seconds of a step at best: see the module."""
    points = [(span.tokens, span.duration_s) for spans in run.spans() for span in spans if span.kind == "DECODE"]
    fixed, per_sample = line_through([point for point in points if point[0]])
    longest = [len(ids) for ids in samples_of(run, first=WARM_UP + 1)]
    steps = max(1, len(run.spans()))
    alone = max(longest) * (fixed + per_sample)
    busy = sum(span.duration_s for spans in run.spans() for span in spans if _stage(span)) / steps
    return max(busy / 2, alone)


def _stage(span: Span) -> bool:
    return span.action.split("/")[0].rpartition(".")[2] in ("generate", "logprobs", "values", "score")


def report(number: int, distribution: Distribution, runs: dict[str, list[Finished]]) -> None:
    seconds = {kind: median(seconds_of(spans) for run in of for spans in run.spans()) for kind, of in runs.items()}
    lengths = [len(ids) for run in runs["off"] for ids in samples_of(run, first=WARM_UP + 1)]
    ceiling = median(ceiling_of(run) for run in runs["off"])
    moved = {
        kind: median(rows["perf/samples_moved"] for run in of for rows in read_rows(run.run_dir / "metrics.jsonl")[1:])
        for kind, of in runs.items()
        if kind != "off"
    }
    print(row(f"lengths {number + 1}", ["seconds", "speed", "moved"], f"mean {sum(lengths) / len(lengths):.0f}"))
    off = seconds["off"]
    for kind, taken_s in seconds.items():
        print(row(kind, [f"{taken_s:.3f}", f"{off / taken_s:.3f}", f"{moved.get(kind, 0):.0f}"]))
    gain, most = off - seconds["auto"], off - ceiling
    part = f"{gain / most:.0%} of it" if most > 0 else ""
    print(row("ceiling", [f"{ceiling:.3f}", f"{off / ceiling:.3f}", ""], part), flush=True)
    same = all(samples_of(run, first=1) == samples_of(runs["off"][0], first=1) for of in runs.values() for run in of)
    if not same:
        print("  (responses differ between kinds)")


def draw(picture: Path, runs: dict[str, list[Finished]]) -> None:
    """The last step of each kind's first run, one above the other: all that was done from the beginning of generation
    to the end of the last score."""
    panels = []
    for kind, of in runs.items():
        step = of[0].spans()[-1]
        stages = [span for span in step if _stage(span)]
        first, last = min(span.start_s for span in stages), max(span.end_s for span in stages)
        spans = [span for span in step if first <= span.start_s < last]
        title = f"fusion: {kind}, {seconds_of(spans):.2f} s"
        panels.append((title, Timeline(tuple(spans), source="measured").shifted(-first)))
    picture.write_text(svg_gantts(panels))


def _word(kind: str) -> float | str:
    return kind if kind in ("off", "auto") else float(kind)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="random models of two layers")
    parser.add_argument("--steps", type=positive, default=3, help="of each run, behind its first")
    parser.add_argument("--repeats", type=positive, default=1)
    parser.add_argument("--prompts", type=positive, default=8)
    parser.add_argument("--samples", type=positive, default=4)
    parser.add_argument("--tokens", type=positive, default=64, help="limit of a response; half of it for further ones")
    parser.add_argument("--distributions", type=positive, default=12)
    parser.add_argument("--shares", nargs="*", default=["0.25", "0.5"], help="of samples, that are forced")
    parser.add_argument("--micro-batch-tokens", type=positive, default=1024)
    parser.add_argument("--first", type=positive, default=1, help="of the distributions, from 1")
    parser.add_argument("--picture", type=Path, help="SVG of the last steps of the first distribution")
    return parser


if __name__ == "__main__":
    sys.exit(main())
