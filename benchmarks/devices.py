"""Two workers of one thread against one: GRPO steps under dp = 2 and pp = 2, and what they could reach at best.

    python benchmarks/devices.py                       # on two idle cores
    python benchmarks/devices.py --tiny --steps 2 --repeats 1   # does the benchmark itself work?

In turns, `--repeats` times, each a process of its own, the first step of each run left out:

    whole   one worker, the whole batch
    half    one worker, half the batch: its decode steps are those of an instance, t(B / 2)
    pair    two of `half` at a time, each with a core: what sharing the machine costs without any communication
    dp2     two workers, the batch shared, optimizer state divided
    pp2     two workers, training and scoring in two stages of equal work (the last one has the head, hence fewer
            layers: its share is measured, `placed/stages.py`), two instances that generate

The ceiling is computed from phases of `whole` and `half` and the bytes that a rank received outside pipelines (in
optimizer steps, and moves of weights; from the measured timeline) over the bandwidth of a link measured in between
(`placed/ceiling.py`); `shared` is the same with the phases of `pair`: no plan on this machine can be faster than two
processes that never talk. Goal: the measured speed is at least 90 % of the ceiling; both are printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ending import ends_when_terminated
from placed.ceiling import Phases, data_parallel, pipelined
from placed.idle import link_bytes_per_s
from placed.recipes import grpo
from placed.runs import Finished, RunFailed, run_beside
from placed.stages import Shares, shares_of
from sides import positive, row

from plait.layout.shards import balanced_stages

WARM_UP = 1
PLANS = ("dp2", "pp2")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    with ends_when_terminated(), tempfile.TemporaryDirectory(prefix="plait-devices-") as name:
        folder = Path(name)
        recipe = grpo(
            folder,
            is_tiny=options.tiny,
            prompts=options.prompts,
            samples=options.samples,
            steps=WARM_UP + options.steps,
        )
        # so many that a pipeline fills; the same for all, as micro-batches differ in speed
        recipe["micro_batch_tokens"] = options.micro_batch_tokens
        try:
            runs, links = measure(recipe, folder, options)
        except RunFailed as error:
            print(error, file=sys.stderr)
            return 2
        report(runs, median(links), recipe)
    return 0


def measure(
    recipe: dict[str, Any], folder: Path, options: argparse.Namespace
) -> tuple[dict[str, list[Finished]], list[float]]:
    """Every kind of run, `--repeats` times in turns, and the bandwidth of a link measured each time."""
    half = recipe | {"prompts_per_step": recipe["prompts_per_step"] // 2}
    pp2 = folder / "pp2.json"
    pp2.write_text(json.dumps(_pp2_plan(shares_of(recipe))))
    kinds = {
        "whole": [recipe],
        "half": [half],
        "pair": [half, half],
        "dp2": [recipe | {"plan": "colocated", "devices": 2}],
        "pp2": [recipe | {"plan": str(pp2)}],
    }
    runs: dict[str, list[Finished]] = {kind: [] for kind in kinds}
    links = []
    for number in range(options.repeats):
        links.append(link_bytes_per_s())
        for kind, recipes in kinds.items():
            places = [folder / f"{kind}-{number}-{i}" for i in range(len(recipes))]
            jobs = [{"recipe": own, "launched": kind in PLANS} for own in recipes]
            runs[kind] += run_beside(jobs, places, WARM_UP)
    return runs, links


def report(runs: dict[str, list[Finished]], bytes_per_s: float, recipe: dict[str, Any]) -> None:
    phases = {kind: middle([run.phases() for run in of_kind]) for kind, of_kind in runs.items()}
    print(f"one link: {bytes_per_s / 1e9:.2f} GB/s each way, both ways at a time")
    print(row("seconds", ["step", "generate", "score", "train", "optimizer"], "other"))
    for kind, phase in phases.items():
        cells = [phase.step, phase.generate, phase.score, phase.train, phase.optimizer]
        print(row(kind, [f"{seconds:.3f}" for seconds in cells], f"{phase.other:.3f}"))
    print()
    print(row("against one worker", ["speed", "ceiling", "of it", "shared", "of it"], "MB received"))
    for kind in PLANS:
        received = median(run.received_bytes(("RECV", "STEP")) for run in runs[kind])
        ceilings = [
            ceiling(kind, phases["whole"], phases["half"], phases[kind], received, bytes_per_s),
            ceiling(kind, as_whole(phases), phases["pair"], phases[kind], received, bytes_per_s),
        ]
        speed = phases["whole"].step / phases[kind].step
        cells = [f"{speed:.2f}"]
        for best in ceilings:
            cells += [f"{phases['whole'].step / best:.2f}", f"{best / phases[kind].step:.1%}"]
        print(row(kind, cells, f"{received / 1e6:.1f}"))


def ceiling(kind: str, whole: Phases, half: Phases, here: Phases, received: float, bytes_per_s: float) -> float:
    """Seconds of a step at best."""
    if kind == "dp2":
        return data_parallel(whole, half, received, bytes_per_s)
    return pipelined(whole, half, here.score_micro_batches, here.train_micro_batches, received, bytes_per_s)


def as_whole(phases: dict[str, Phases]) -> Phases:
    """A step over the whole batch by a worker that shares the machine: `whole`, slowed down as `half` is in a pair."""
    whole, half, pair = phases["whole"], phases["half"], phases["pair"]
    slowed = {
        name: getattr(whole, name) * getattr(pair, name) / getattr(half, name)
        for name in ("score", "train", "optimizer")
        if getattr(half, name) > 0
    }
    slow = replace(whole, **slowed)
    return replace(slow, step=whole.other + slow.generate + slow.score + slow.train + slow.optimizer)


def middle(runs: Sequence[Phases]) -> Phases:
    """Field by field the median."""
    names = ("step", "generate", "score", "train", "optimizer", "score_micro_batches", "train_micro_batches")
    return Phases(**{name: median(getattr(phases, name) for phases in runs) for name in names})


def _pp2_plan(shares: Shares) -> dict[str, Any]:
    stages = (balanced_stages(shares.layers, 2, head) for head in shares.head)
    train, score = ({"ranks": [0, 1], "pp": 2, "stages": list(layers)} for layers in stages)
    placements = [
        {"call": "actor.generate", "mode": "decode", "ranks": [0, 1], "dp": 2},
        {"call": "ref.logprobs", "mode": "score"} | score,
        {"call": "actor.train", "mode": "train"} | train,
    ]
    return {"format": "plait-plan", "version": 1, "name": "pp2", "num_ranks": 2, "placements": placements}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers")
    parser.add_argument("--steps", type=positive, default=5, help="of each run, behind its first")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--prompts", type=positive, default=16)
    parser.add_argument("--samples", type=positive, default=4)
    parser.add_argument("--micro-batch-tokens", type=positive, default=1024)
    return parser


if __name__ == "__main__":
    sys.exit(main())
