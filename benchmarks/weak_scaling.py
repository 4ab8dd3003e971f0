"""Weak scaling of PPO from 8 to 256 devices: as many prompts for each device on any number of them. All steps are
simulated.

    python benchmarks/weak_scaling.py [--devices 8,16,32,64,128,256] [--model llama-2-7b] [--seconds 5] [--tiny]

On the machines of ReaL's experiments (recipes/clusters/real.yaml), whose three constants are fitted to published times;
how far off these are in the mean stands beside each number, as it does for every step that they predict. Beside the
plan that is found, ReaL's heuristic on the same devices. Efficiency is tokens a second and device over those of the
fewest devices, which have 100 % by definition.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from published import ROOT, mean_error, real_points

from plait.cost.cluster_file import read_cluster
from plait.cost.lengths import Lengths, SampleLengths
from plait.errors import PlaitError
from plait.planner.plan_search import Budget
from plait.recipes.recipe_file import load_recipe
from plait.runtime.prediction.choosing import choose
from plait.runtime.prediction.planning import Planning
from plait.runtime.prepare import outline

PROMPTS_PER_DEVICE = 32
MICRO_BATCH_TOKENS = 1 << 16
"""ReaL's recipe has no bound: its batches stay the same on more devices."""
RESPONSES = Lengths.lognormal(300, 0.8, 1024)


@dataclass(frozen=True)
class Scaled:
    """devices; seconds of a step of the plan found, and of ReaL's heuristic (None: it does not fit); tokens of a
    step"""

    devices: int
    found_s: float
    heuristic_s: float | None
    tokens: float

    @property
    def each(self) -> float:
        """Tokens a second of a device."""
        return self.tokens / self.found_s / self.devices


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="8,16,32,64,128,256")
    parser.add_argument("--model", default="llama-2-7b")
    parser.add_argument("--seconds", type=float, default=5.0, help="of CPU time, to search on each number of devices")
    parser.add_argument("--tiny", action="store_true", help="a small model, few devices, short searches")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.model, options.devices, options.seconds = "smollm2-135m", "2,4", 0.1
    try:
        counts = [int(word) for word in options.devices.split(",")]
        rows = [scaled(devices, options.model, options.seconds) for devices in counts]
    except (ValueError, PlaitError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in table(rows, mean_error(list(real_points()))):
        print(line)
    return 0


def scaled(devices: int, model: str, seconds: float) -> Scaled:
    """The plan that a search of so many CPU seconds finds. Raises PlaitError where none fits."""
    planning = planning_of(devices, model)
    choice = choose(planning, Budget(10**9, seconds, time.process_time))
    heuristic = next(one.prediction for one in choice.baselines if one.name == "ReaL heuristic")
    return Scaled(
        devices,
        choice.best.prediction.seconds_per_step,
        heuristic.seconds_per_step if heuristic.feasible else None,
        planning.workload.tokens_of_step(planning.flow),
    )


def planning_of(devices: int, model: str) -> Planning:
    prompts = PROMPTS_PER_DEVICE * devices
    keys: list[tuple[str, object]] = [(key, model) for key in ("model", "critic.model", "reward.model")]
    keys += [("prompts_per_step", prompts), ("sampling.max_response_tokens", RESPONSES.longest)]
    keys += [("micro_batch_tokens", MICRO_BATCH_TOKENS)]
    cluster = read_cluster(str(ROOT / "recipes/clusters/real.yaml"), devices)
    run = outline(load_recipe(ROOT / "recipes/published/real.yaml", keys))
    lengths = SampleLengths(Lengths.fixed(128), RESPONSES)
    return Planning(run.recipe, run.flow, run.models, run.shapes, cluster, lengths)


def table(rows: Sequence[Scaled], error: float) -> Iterator[str]:
    """In Markdown."""
    yield "| devices | simulated seconds of a step | tokens a second and device | efficiency | ReaL's heuristic |"
    yield "|---|---|---|---|---|"
    for row in rows:
        efficiency = f"{row.each / rows[0].each:.0%}" + (f" ± {error:.0%}" if row is not rows[0] else "")
        heuristic = "does not fit" if row.heuristic_s is None else f"{row.heuristic_s:.1f} ± {error:.0%}"
        yield (
            f"| {row.devices} | {row.found_s:.1f} ± {error:.0%} | {row.each:,.0f} ± {error:.0%} | "
            f"{efficiency} | {heuristic} |"
        )


if __name__ == "__main__":
    sys.exit(main())
