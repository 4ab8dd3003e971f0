"""Generation and scoring on two workers of one thread: the last samples gathered by `auto`, at forced shares, or never.

    python benchmarks/stage_fusion.py                        # on two idle cores, about half an hour
    python benchmarks/stage_fusion.py --distributions 4 --shares 0.25 0.5      # with forced shares, ten minutes
    python benchmarks/stage_fusion.py --tiny --repeats 1     # does the benchmark itself work?
    python benchmarks/stage_fusion.py --distributions 3 --first 3 --picture fused-step.svg    # of one, a picture too

The work: SmolLM2-135M-Instruct generates on two instances; a reference, a critic and a reward model of its size score
on the same two workers; nothing is trained. Lengths are given: log-normal, those of one prompt alike, cut at a limit,
of several medians and spreads; instances do not know them. Each step is done in all ways, one after the other, with
the same responses, token for token.

    off      samples end where they begin, and scoring begins when all have ended
    auto     the gate decides, from the second step on: the first, which shows it what things take, does not count
    0.25 …   samples are gathered when so large a share is unfinished

Seconds are from the beginning of generation to the end of the last score, the median of the steps; `speed`, how many
times as fast as `off`, is the median of the steps' own. Instances give each other samples for nothing else
(`rebalance: off`). The ceiling is computed from `off` of the same step: all that both workers did, evenly on both, but
never less than the longest response takes one token at a time. `of it` is how much of the ceiling's gain `auto` has, of
all steps together; `auto` against `off` below 1 is a loss.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from ending import ends_when_terminated
from placed.by_turns import Turn, turns_of
from placed.lengths import LogNormal
from placed.recipes import grpo, write_reward_model
from placed.runs import RunFailed
from sides import positive, row

from plait.policy.decode_pace import line_through
from plait.schedule.gantt import svg_gantts
from plait.schedule.timeline import Timeline

STAGES = ("generate", "logprobs", "values", "score")
MEDIANS, BETWEEN, LIMITS = (0.05, 0.15, 0.4), (0.3, 1.0), (1.0, 0.5)
"""Of the lengths, as shares of the limit; spreads of the prompts' medians; limits, as shares of the option's."""
WITHIN = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.first > options.distributions:
        print(f"--first: expected at most {options.distributions}, found {options.first}", file=sys.stderr)
        return 2
    with ends_when_terminated(), tempfile.TemporaryDirectory(prefix="plait-fusion-") as name:
        folder = Path(name)
        recipe = base_recipe(folder, options)
        try:
            for number, lengths in list(enumerate(distributions(options)))[options.first - 1 :]:
                steps = []
                for repeat in range(options.repeats):
                    ways = ("off", "auto", *options.shares)
                    place = folder / f"{number}-{repeat}"
                    steps += turns_of(recipe, place, ways, lengths, steps=options.steps)
                report(number, steps)
                if options.picture is not None and number == options.first - 1:
                    options.picture.write_text(picture(steps[-1]))
        except RunFailed as error:
            print(error, file=sys.stderr)
            return 2
    return 0


def base_recipe(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    recipe = grpo(folder, is_tiny=options.tiny, prompts=options.prompts, samples=options.samples, steps=1)
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
        "reward": {"model": [write_reward_model(recipe["model"], folder / "reward")]},
        "rebalance": "off",
        "plan": str(plan),
        "micro_batch_tokens": options.micro_batch_tokens,
    }


def distributions(options: argparse.Namespace) -> list[LogNormal]:
    kinds = [
        LogNormal(median * share * options.tokens, between, WITHIN, int(share * options.tokens))
        for share, median, between in product(LIMITS, MEDIANS, BETWEEN)
    ]
    return kinds[: options.distributions]


def ceiling_of(turn: Turn) -> float:
    """Seconds of a step at best: see the module."""
    alone = 0.0
    if steps := turn.decode_steps:
        alone = max(map(len, turn.responses)) * sum(line_through(steps))
    busy = sum(span.duration_s for span in turn.of(*STAGES))
    return max(busy / 2, alone)


def report(number: int, steps: Sequence[Mapping[str, Turn]]) -> None:
    seconds = {way: [step[way].seconds(*STAGES) for step in steps] for way in steps[0]}
    lengths = [len(response) for step in steps for response in step["off"].responses]
    ceilings = [ceiling_of(step["off"]) for step in steps]
    off = seconds["off"]
    print(row(f"lengths {number + 1}", ["seconds", "speed", "moved"], f"mean {sum(lengths) / len(lengths):.0f}"))
    for way, taken in seconds.items():
        moved = median(step[way].moved for step in steps)
        print(row(way, [f"{median(taken):.3f}", f"{_speed(off, taken):.3f}", f"{moved:.0f}"]))
    gain, most = sum(off) - sum(seconds["auto"]), sum(off) - sum(ceilings)
    part = f"{gain / most:.0%} of it" if most > 0 else ""
    print(row("ceiling", [f"{median(ceilings):.3f}", f"{_speed(off, ceilings):.3f}", ""], part), flush=True)
    if any(turn.responses != step["off"].responses for step in steps for turn in step.values()):
        print("  (responses differ between ways)")


def _speed(off: Sequence[float], taken: Sequence[float]) -> float:
    return median(before / after for before, after in zip(off, taken, strict=True))


def picture(step: Mapping[str, Turn]) -> str:
    """A step in all its ways, one above the other: what was done from the beginning of generation to the end of the
    last score, as SVG."""
    panels = []
    for way, turn in step.items():
        stages = turn.of(*STAGES)
        first, last = min(span.start_s for span in stages), max(span.end_s for span in stages)
        spans = [span for span in turn.spans if first <= span.start_s < last]
        title = f"fusion: {way}, {turn.seconds(*STAGES):.2f} s"
        panels.append((title, Timeline(tuple(spans), source="measured").shifted(-first)))
    return svg_gantts(panels)


def _share(text: str) -> str:
    if not 0.0 < float(text) < 1.0:
        raise argparse.ArgumentTypeError(f"expected a number between 0 and 1, found {text}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="random models of two layers")
    parser.add_argument("--steps", type=positive, default=6, help="of each run, behind its first")
    parser.add_argument("--repeats", type=positive, default=1)
    parser.add_argument("--prompts", type=positive, default=16)
    parser.add_argument("--samples", type=positive, default=4)
    parser.add_argument("--tokens", type=positive, default=160, help="limit of a response; half of it for further ones")
    parser.add_argument("--distributions", type=positive, default=12)
    parser.add_argument("--shares", nargs="*", type=_share, default=[], help="of samples, that are forced")
    parser.add_argument("--micro-batch-tokens", type=positive, default=1024)
    parser.add_argument("--first", type=positive, default=1, help="of the distributions, from 1")
    parser.add_argument("--picture", type=Path, help="SVG of the last step of the first distribution")
    return parser


if __name__ == "__main__":
    sys.exit(main())
