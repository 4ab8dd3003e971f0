"""Generation beside training on two workers: GRPO on the demo's task, synchronous and with batches generated ahead.

    python benchmarks/overlap.py                        # on two idle cores
    python benchmarks/overlap.py --reply-s 2            # a tool replies once to each sample, and takes two seconds
    python benchmarks/overlap.py --tiny --repeats 1     # does the benchmark itself work?

Two workers of one thread each, `--repeats` times in turns, each kind a run of its own:

    colocated   both workers generate and train, half of the samples each; synchronous
    split       one worker generates and asks the reference, the other trains; synchronous
    n = 1, 2    the same split, with `max_staleness` of 1 and 2
    keep        the same with 1, and samples that go on with new weights (`partial_rollout`); with `--reply-s`

Steps at the beginning (the first, which draws several batches) and at the end (which draw none) do not count. Printed
per kind: samples per second, the share of the time in which the worker that generates and the one that trains computed
nothing, and what the busier worker computes in a step over the step: 1 is what n = 1 could reach at best. Beside
colocated workers that are always busy a split can only win where these have something to wait for.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ending import ends_when_terminated
from placed.recipes import grpo
from placed.runs import Finished, RunFailed, run_alone
from sides import positive, row

from plait.observe.run_log import read_rows
from plait.recipes.recipe_file import read_tree
from plait.schedule.timeline import covered_s, load_any

ROOT = Path(__file__).resolve().parents[1]
MOST = 2
"""Versions that samples may be behind, in the kind with the most."""
WARM_UP = 2
REPLY = """
import time

def reply(messages, **columns):
    time.sleep({seconds})
    return "Are you sure? Answer again."
"""
KINDS: dict[str, dict[str, Any]] = {
    "colocated": {"plan": "colocated"},
    "split": {"plan": "split"},
    "n = 1": {"plan": "split", "max_staleness": 1},
    "n = 2": {"plan": "split", "max_staleness": 2},
}
KEEP = {"keep": {"plan": "split", "max_staleness": 1, "partial_rollout": "keep"}}


@dataclass(frozen=True)
class Measured:
    """The steps of a run that count."""

    samples_per_s: float
    idle: tuple[float, float]
    """Of the workers 0, which generates where one does, and 1."""
    longer_side: float
    """Seconds that the busier worker computed, over the seconds of the steps."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    kinds = KINDS | (KEEP if options.reply_s else {})
    runs_by_kind: dict[str, list[Measured]] = {kind: [] for kind in kinds}
    with ends_when_terminated(), tempfile.TemporaryDirectory(prefix="plait-overlap-") as name:
        folder = Path(name)
        recipe = the_recipe(folder, options)
        try:
            for number in range(options.repeats):
                for place, (kind, keys) in enumerate(kinds.items()):
                    job = {"recipe": recipe | keys | {"devices": 2}, "launched": True}
                    run = run_alone(job, folder / f"{place}-{number}", WARM_UP)
                    runs_by_kind[kind].append(measured(run, recipe))
        except RunFailed as error:
            print(error, file=sys.stderr)
            return 2
    report(runs_by_kind)
    return 0


def the_recipe(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The demo's task, or with a random model of two layers the work of the other benchmarks of workers."""
    steps = WARM_UP + options.steps + MOST
    turns = {}
    if options.reply_s:
        (folder / "tool.py").write_text(REPLY.format(seconds=options.reply_s))
        turns = {"turns": {"reply": f"{folder}/tool.py:reply", "max_turns": 2, "workers": options.workers}}
    if options.tiny:
        return grpo(folder, is_tiny=True, prompts=4, samples=4, steps=steps) | turns
    recipe = read_tree(ROOT / "recipes/demo.yaml") | {"steps": steps, "threads": 1, "prompts_per_step": options.prompts}
    return recipe | {"evaluation": {"items": 0}, "checkpoint": {"every": 0}, "doctor": {"enabled": False}} | turns


def measured(run: Finished, recipe: dict[str, Any]) -> Measured:
    """Rows are written as steps end, one behind the other: the steps that count end where the last `MOST` begin."""
    rows = read_rows(run.run_dir / "metrics.jsonl")
    counted = [row["timing_s/step"] for row in rows[WARM_UP:-MOST]]
    spans = [span for span in load_any(run.run_dir / "trace.json").spans if span.lane == "compute"]
    end = max(span.end_s for span in spans if span.kind == "STEP" and span.step == rows[-MOST - 1]["step"])
    begin = end - sum(counted)
    busy = {
        rank: covered_s(
            (max(span.start_s, begin), min(span.end_s, end))
            for span in spans
            if span.rank == rank and span.end_s > begin and span.start_s < end
        )
        for rank in (0, 1)
    }
    samples = len(counted) * recipe["prompts_per_step"] * recipe["samples_per_prompt"]
    seconds = sum(counted)
    return Measured(samples / seconds, (1 - busy[0] / seconds, 1 - busy[1] / seconds), max(busy.values()) / seconds)


def report(runs_by_kind: dict[str, list[Measured]]) -> None:
    print(row("", ["samples/s", "to split", "idle gen", "idle train", "longer side"]))
    base = median(run.samples_per_s for run in runs_by_kind["split"])
    for kind, runs in runs_by_kind.items():
        speed = median(run.samples_per_s for run in runs)
        idle = [median(run.idle[side] for run in runs) for side in (0, 1)]
        longer = median(run.longer_side for run in runs)
        print(row(kind, [f"{speed:.2f}", f"{speed / base:.2f}", *(f"{share:.0%}" for share in idle), f"{longer:.2f}"]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers")
    parser.add_argument("--steps", type=positive, default=4, help="of each run, that count")
    parser.add_argument("--prompts", type=positive, default=16, help="of a step, 8 samples each")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument(
        "--reply-s", type=float, default=0.0, help="seconds of a reply to each sample; 0: there is none"
    )
    parser.add_argument("--workers", type=positive, default=16, help="that reply at a time")
    return parser


if __name__ == "__main__":
    sys.exit(main())
