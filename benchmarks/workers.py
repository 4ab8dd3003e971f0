"""What it costs to have workers: one local worker against the same run in-process, and workers that do nothing.

    python benchmarks/workers.py                          # all parts
    python benchmarks/workers.py --parts idle --idle 1,2,4,8,16,32,64
    python benchmarks/workers.py --tiny --steps 2 --repeats 1 --idle 1,2   # does the benchmark itself work?

Parts:

    one    GRPO steps of the same recipe in turns, `--repeats` times: in-process, by one launched worker. Medians of a
           step's seconds over all repeats; the first step of a run does not count. Goal: at most 3 % slower.
           Of the launched run also the controller's time: of the leader, what of a step passes while no action runs on
           it (the controller program); of the process that was started, its CPU time from launch to end, divided by
           the steps. Goal: at most 1 % of a step.
    idle   Workers that do nothing, --idle and --led numbers of them. `launched`: the controlling process tells all and
           has all answers, over the launcher; and what it needs while nothing happens (heartbeats). `led`: rank 0 of a
           process group does so, by the messages of a run; each worker imports torch: 64 of them take about 10 GB.
           A GRPO step has about six such rounds: their CPU time as a share of the step measured above is the growth.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from ending import ends_when_terminated
from placed.idle import Cost, launched, led
from placed.recipes import grpo
from placed.runs import Finished, RunFailed, run_alone
from sides import positive, row

PARTS = ("one", "idle")
ROUNDS_PER_STEP = 6
"""Generate, score, train, move the weights, their version, the timeline."""
WARM_UP = 1


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    parts = options.parts.split(",")
    if not parts or not set(parts) <= set(PARTS):
        print(f"--parts: expected some of {','.join(PARTS)}, found {options.parts}", file=sys.stderr)
        return 2
    step_s: float | None = None
    if "one" in parts:
        with ends_when_terminated(), tempfile.TemporaryDirectory(prefix="plait-workers-") as name:
            try:
                step_s = report_one(one_worker(options, Path(name)))
            except RunFailed as error:
                print(error, file=sys.stderr)
                return 2
    if "idle" in parts:
        report_idle("launched", [launched(n, options.rounds, options.rest) for n in _numbers(options.idle)], step_s)
        report_idle("led", [led(n, options.rounds) for n in _numbers(options.led)], step_s)
    return 0


def one_worker(options: argparse.Namespace, folder: Path) -> list[tuple[Finished, Finished]]:
    """(in-process, launched) of each repeat."""
    pairs = []
    recipe = grpo(
        folder, is_tiny=options.tiny, prompts=options.prompts, samples=options.samples, steps=WARM_UP + options.steps
    )
    for number in range(options.repeats):
        alone, launched = (
            run_alone({"recipe": recipe, "launched": is_launched}, folder / f"{name}-{number}", WARM_UP)
            for name, is_launched in (("in-process", False), ("launched", True))
        )
        pairs.append((alone, launched))
    return pairs


def report_one(pairs: list[tuple[Finished, Finished]]) -> float:
    """Print; returns the median seconds of an in-process step."""
    alone = median(s for one, _ in pairs for s in one.steps())
    through = median(s for _, other in pairs for s in other.steps())
    print(row("GRPO step", ["in-process", "one worker"], "ratio"))
    print(row("wall seconds", [f"{alone:.3f}", f"{through:.3f}"], f"{through / alone:.3f}"))
    for name in ("generate", "score", "train", "optimizer"):
        phases = [[getattr(run.phases(), name) for run in runs] for runs in zip(*pairs, strict=True)]
        one, other = (median(seconds) for seconds in phases)
        print(row(f"  {name}", [f"{one:.3f}", f"{other:.3f}"], f"{other / one:.3f}"))
    per_pair = [median(other.steps()) / median(one.steps()) for one, other in pairs]
    print(row("ratio of each pair", [f"{ratio:.3f}" for ratio in per_pair]))
    idle = [
        max(0.0, s - busy(spans)) for _, other in pairs for s, spans in zip(other.steps(), other.spans(), strict=True)
    ]
    print(row("leader outside actions", ["", f"{1e3 * median(idle):.1f} ms"], f"{median(idle) / through:.2%}"))
    watching = [other.controller_cpu_s / (len(other.steps()) + other.warm_up) for _, other in pairs]
    print(row("CPU of the supervisor", ["", f"{1e3 * median(watching):.1f} ms"], f"{median(watching) / through:.2%}"))
    return alone


def busy(spans) -> float:
    """Seconds in which rank 0 ran some action, overlapping ones counted once."""
    total, end = 0.0, float("-inf")
    for span in sorted((span for span in spans if span.rank == 0), key=lambda span: span.start_s):
        total += max(0.0, span.end_s - max(end, span.start_s))
        end = max(end, span.end_s)
    return total


def report_idle(title: str, costs: Sequence[Cost], step_s: float | None) -> None:
    print(f"\n{title}: idle workers, one round")
    print(row("workers", ["wall ms", "CPU ms", "CPU at rest"], "of a step"))
    for cost in costs:
        resting = "" if cost.resting is None else f"{cost.resting:.2%}"
        share = "" if step_s is None else f"{ROUNDS_PER_STEP * cost.cpu_s / step_s:.3%}"
        print(row(str(cost.workers), [f"{1e3 * cost.wall_s:.2f}", f"{1e3 * cost.cpu_s:.2f}", resting], share))


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--steps", type=positive, default=6, help="of each run, behind its first")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--prompts", type=positive, default=8)
    parser.add_argument("--samples", type=positive, default=4)
    parser.add_argument("--idle", default="1,2,4,8,16,32,64")
    parser.add_argument("--led", default="2,4,8,16,32,64")
    parser.add_argument("--rounds", type=positive, default=200)
    parser.add_argument("--rest", type=float, default=5.0, help="seconds in which nothing happens")
    return parser


if __name__ == "__main__":
    sys.exit(main())
