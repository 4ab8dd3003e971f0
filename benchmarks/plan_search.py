"""Engines that search plans, at equal evaluations and at equal seconds, and plans of others. All steps are simulated.

    python benchmarks/plan_search.py [--devices 8,32,128] [--evaluations 3000] [--seconds 5] [--repeats 5] [--tiny]
    python benchmarks/plan_search.py --devices 8,32,128 --repeats 3           # some minutes
    python benchmarks/plan_search.py --devices 128 --repeats 8 --long 100     # new searches against long ones
    python benchmarks/plan_search.py --whole --devices 64,512 [--out kept.json] [--against kept.json]

PPO with calls of models known by their shapes, on A100s. Seconds are CPU seconds of this process, so that other work on
the machine does not count; at equal seconds the cost model's answers are kept from the searches before, as they are the
same for all engines. `gap` is the median over seeds of a step's seconds above the best that any engine found, `fits`
the share of seeds in which a plan that fits was found. The last lines are plans of others, valued by the same
simulation. `--tiny` takes small models and few evaluations.

With `--long` a portfolio that knows nothing yet searches for `--seconds`, as `plait plan` does, with each of
`--repeats` seeds; its gap is to the best plan of these and of two searches of so many seconds with other seeds.

With `--whole` all of what a run does to find its plan is timed, for GRPO and PPO of models of 7B and 70B: what comes
before the search, the search (`--evaluations`), and exact predictions of the best plans and of those of others.
Imports, and what limits each role's layouts, come before. `--out` keeps the table as JSON; `--against` puts a kept one
beside it: the exit code is 1 if a plan is slower than there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from pathlib import Path
from statistics import median

from sides import positive

from plait.cost.cluster_file import read_cluster
from plait.cost.lengths import Lengths, SampleLengths
from plait.errors import PlaitError
from plait.planner.plan_search import BETAS, Budget, Engine, SearchResult, search
from plait.recipes.recipe_file import load_recipe
from plait.runtime.prediction.choosing import choose, searched
from plait.runtime.prediction.planning import Planning
from plait.runtime.prepare import outline

PUBLISHED = Path(__file__).parents[1] / "recipes" / "published"
WHOLE = {"ppo": "hybridflow.yaml", "grpo": "grpo.yaml"}
"""Recipes of `--whole`."""
SIZES = {"7b": "llama-2-7b", "70b": "llama-2-70b"}
RECIPE = Path(__file__).parents[1] / "examples" / "large_ppo.yaml"
TINY = (("model", "smollm2-135m"), ("critic.model", "smollm2-135m"), ("prompts_per_step", 16))

ENGINES = {
    "portfolio": BETAS,
    "descent": (inf,) * 4,
    "hot": (2.0,) * 4,
    "random": (0.0,) * 4,
}
"""Temperatures of the chains: `random` accepts everything."""


@dataclass(frozen=True)
class Row:
    engine: str
    values: tuple[float | None, ...]
    evaluations: float

    def text(self, best: float) -> str:
        numbers = [value for value in self.values if value is not None]
        gap = f"{median(numbers) / best - 1:>8.2%}" if numbers else f"{'-':>8}"
        return f"  {self.engine:<16}{gap}{len(numbers) / len(self.values):>8.0%}{self.evaluations:>14,.0f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="8,32,128")
    parser.add_argument("--evaluations", type=positive, default=3000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeats", type=positive, default=5, help="seeds of each engine")
    parser.add_argument("--long", type=float, default=0.0, help="seconds of searches that new ones are held against")
    parser.add_argument("--whole", action="store_true", help="time all that a run does to find its plan")
    parser.add_argument("--out", type=Path, help="of --whole: a file that keeps what was found")
    parser.add_argument("--against", type=Path, help="of --whole: a file that was kept before")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.devices, options.evaluations, options.seconds = "2", 15, 0.05
    if options.whole:
        return find_whole(options)
    try:
        plannings = {int(word): planning_of(int(word), tiny=options.tiny) for word in options.devices.split(",")}
    except (ValueError, PlaitError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for devices, planning in plannings.items():
        if options.long:
            hold_against_long(devices, options)
        else:
            compare(planning, options)
    return 0


def planning_of(devices: int, *, tiny: bool) -> Planning:
    reward = str(RECIPE.parent / "length_reward.py:brief")
    keys = [("reward.functions", [reward]), *(TINY if tiny else ())]
    cluster = read_cluster(f"{devices}xA100-80G")
    run = outline(load_recipe(RECIPE, keys), device_memory=cluster.device.memory_bytes)
    lengths = SampleLengths(Lengths.fixed(256), Lengths.lognormal(300, 0.8, 1024))
    return Planning(run.recipe, run.flow, run.models, run.shapes, cluster, lengths)


def compare(planning: Planning, options: argparse.Namespace) -> None:
    print(f"{planning.cluster.name}, simulated")
    first = searched(planning, Budget(options.evaluations), 0)
    for title, budget in (
        (f"{options.evaluations:,} evaluations", Budget(options.evaluations)),
        (f"{options.seconds:g} s", Budget(10**9, options.seconds, time.process_time)),
    ):
        rows = []
        for engine, betas in ENGINES.items():
            runs = [found_by(planning, budget, seed, betas) for seed in range(options.repeats)]
            values = tuple(run.best.valued.value if run.best else None for run in runs)
            rows.append(Row(engine, values, sum(run.evaluations for run in runs) / len(runs)))
        best = min((value for row in rows for value in row.values if value is not None), default=inf)
        print(f"  {title:<18}{'gap':>6}{'fits':>8}{'evaluations':>14}   best {best:.4g} s a step")
        for row in rows:
            print(row.text(best), flush=True)
    print("  plans of others")
    for baseline in first.baselines:
        fits = "fits" if baseline.valued.usable else "does not fit" if baseline.valued.excess else "idle devices"
        print(f"  {baseline.name:<16}{baseline.valued.seconds:>8.4g} s   {fits}")


def find_whole(options: argparse.Namespace) -> int:
    """Returns 1 where a plan is slower than the one that was kept."""
    before = {} if options.against is None else json.loads(options.against.read_text())
    sizes = {"tiny": "smollm2-135m"} if options.tiny else SIZES
    found: dict[str, dict[str, float]] = {}
    print(f"{'':<18}{'CPU s':>8}{'plans':>8}{'a step, s':>12}{'before: CPU s':>16}{'a step, s':>12}")
    for devices, (size, model), algorithm in product(options.devices.split(","), sizes.items(), WHOLE):
        name = f"{devices} {size} {algorithm}"
        planning = published_planning(int(devices), model, WHOLE[algorithm])
        _ = planning.costs, planning.graph  # imports, on the first of them
        began = time.process_time()
        try:
            choice = choose(planning, Budget(options.evaluations), 0)
        except PlaitError as error:
            print(f"{name:<18}  {str(error)[:90]}", flush=True)
            continue
        spent_s, step_s = time.process_time() - began, choice.best.prediction.seconds_per_step
        found[name] = {"cpu_s": spent_s, "evaluations": choice.evaluations, "step_s": step_s}
        kept = before.get(name)
        beside = "" if kept is None else f"{kept['cpu_s']:>16.1f}{kept['step_s']:>12.5g}"
        print(f"{name:<18}{spent_s:>8.1f}{choice.evaluations:>8,}{step_s:>12.5g}{beside}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1))
    return int(any(name in before and row["step_s"] > before[name]["step_s"] for name, row in found.items()))


def published_planning(devices: int, model: str, recipe: str) -> Planning:
    """Of a recipe of `recipes/published` with models of one size, on A100s."""
    cluster = read_cluster(f"{devices}xA100-80G")
    loaded = load_recipe(PUBLISHED / recipe, [("model", model), ("reward.model", model)])
    run = outline(loaded, device_memory=cluster.device.memory_bytes)
    lengths = SampleLengths(Lengths.fixed(256), Lengths.lognormal(300, 0.8, 1024))
    return Planning(run.recipe, run.flow, run.models, run.shapes, cluster, lengths)


def hold_against_long(devices: int, options: argparse.Namespace) -> None:
    planning = planning_of(devices, tiny=options.tiny)
    print(f"{planning.cluster.name}, simulated")

    def found(seed: int, seconds: float) -> SearchResult:
        budget = Budget(10**9, seconds, time.process_time)
        return found_by(planning_of(devices, tiny=options.tiny), budget, seed, BETAS)

    new = {seed: found(seed, options.seconds) for seed in range(options.repeats)}
    long = [found(options.repeats + number, options.long) for number in range(2)]
    values = {run.best.valued.value for run in (*new.values(), *long) if run.best is not None}
    if not values:
        print("  no plan fits")
        return
    best = min(values)
    print(f"  best of all {best:.4g} s a step")
    for seed, run in new.items():
        gap = f"{run.best.valued.value / best - 1:.2%}" if run.best is not None else "does not fit"
        print(f"  {options.seconds:g} s, seed {seed}: {gap:>8}   {run.evaluations:,} plans")


def found_by(planning: Planning, budget: Budget, seed: int, betas: tuple[float, ...]) -> SearchResult:
    """With simulations of its own; what the cost model says is kept."""
    return search(planning.space.problem, budget, seed=seed, engine=Engine(betas), space=planning.space)


if __name__ == "__main__":
    sys.exit(main())
