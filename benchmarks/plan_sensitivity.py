"""How long a plan that was found stays a good one where the numbers that it was found by are wrong. Simulated.

    python benchmarks/plan_sensitivity.py                    # all settings, many minutes
    python benchmarks/plan_sensitivity.py --settings real    # one of those of plan_ablation.py: real, rlhfuse, prompts
    python benchmarks/plan_sensitivity.py --tiny --repeats 1   # does the benchmark itself work?

A plan is searched for a cluster. Then one number at a time is by `--by` (30 %) smaller and larger: what the cost model
says of the machine, or the length of responses. `kept` is the step that the plan takes then, `best` that of the best
plan which a search by the changed numbers finds, and `lost` what the plan takes more. So `lost` is the price of wrong
numbers, and not their error: seconds are wrong by more than that. `unsearched` is the same of the best plan that needs
no search: one by name, or one that another system would make. Nothing is timed, so tables are the same on any machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from plan_ablation import SETTINGS, chosen, planning_of
from sides import positive

from plait.cost.cluster import ClusterSpec
from plait.cost.hardware import Link
from plait.cost.lengths import Lengths
from plait.errors import PlaitError
from plait.planner.plan_search import Budget
from plait.runtime.prediction.choosing import PredictedPlan, choose, choose_best
from plait.runtime.prediction.planning import Planning
from plait.schedule.plan import Plan

NEAR = 0.05
"""A plan that takes so much more than the best one is near it."""
Change = Callable[[Planning, float], Planning]


def of_cluster(change: Callable[[ClusterSpec, float], ClusterSpec]) -> Change:
    return lambda planning, factor: replace(planning, cluster=change(planning.cluster, factor))


def of_software(*names: str) -> Change:
    """Numbers of what software makes of a machine, of nodes of all kinds alike."""

    def change(cluster: ClusterSpec, factor: float) -> ClusterSpec:
        software = cluster.software
        return replace(
            cluster, software=replace(software, **{name: getattr(software, name) * factor for name in names})
        )

    return of_cluster(change)


def wider(link: Link, factor: float) -> Link:
    return replace(link, bandwidth=link.bandwidth * factor)


def of_link(name: str) -> Change:
    """The bandwidth of a link, of nodes of all kinds alike."""

    def change(cluster: ClusterSpec, factor: float) -> ClusterSpec:
        kinds = tuple(replace(kind, **{name: wider(getattr(kind, name), factor)}) for kind in cluster.kinds)
        return replace(cluster, kinds=kinds, **{name: wider(getattr(cluster, name), factor)})

    return of_cluster(change)


def of_responses(planning: Planning, factor: float) -> Planning:
    """A run cuts them at the recipe's limit, as before."""
    most, said = planning.recipe.sampling.max_response_tokens, planning.lengths.responses.values
    responses = Lengths.recorded([min(most, max(1, round(tokens * factor))) for tokens in said])
    return replace(planning, lengths=replace(planning.lengths, responses=responses))


CHANGES: dict[str, Change] = {
    "products": of_software("products"),
    "memory bandwidth": of_software("memory"),
    "least seconds of a layer": of_software("layer_s"),
    "links within a node": of_link("intra"),
    "links between nodes": of_link("inter"),
    "links to host memory": of_link("host"),
    "length of responses": of_responses,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=",".join(SETTINGS), help="which of them")
    parser.add_argument("--evaluations", type=positive, default=1000, help="plans that each search values")
    parser.add_argument("--by", type=float, default=0.3, help="share by which a number is wrong, between 0 and 1")
    parser.add_argument("--repeats", type=positive, default=1, help="seeds of each search for the best plan")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.settings, options.evaluations = "prompts", 20
    if not 0 < options.by < 1:
        print(f"error: --by: expected a share between 0 and 1, found {options.by:g}", file=sys.stderr)
        return 2
    try:
        for setting in chosen(options.settings):
            compare(planning_of(setting, tiny=options.tiny), setting.title, options)
    except PlaitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def compare(planning: Planning, title: str, options: argparse.Namespace) -> None:
    choice = choose(planning, Budget(options.evaluations), 0)
    found = choice.best
    unsearched = min((plan for plan in choice.baselines if plan.prediction.feasible), key=of_step, default=None)
    beside = "none fits" if unsearched is None else f"{unsearched.name}, {of_step(unsearched):.4g} s"
    print(f"{title}, predicted: {of_step(found):.4g} s a step; unsearched: {beside}")
    print(f"  {'a number':<34}{'kept':>10}{'best':>10}{'lost':>9}{'unsearched':>12}")
    rows = []
    for name, change in CHANGES.items():
        for factor in (1 - options.by, 1 + options.by):
            changed = change(planning, factor)
            if changed == planning:  # no response was shorter than the limit
                continue
            kept_s = step_of(changed, found.plan)
            other_s = inf if unsearched is None else step_of(changed, unsearched.plan)
            searched = (choose_best(changed, Budget(options.evaluations), seed) for seed in range(options.repeats))
            best_s = min(kept_s, other_s, *map(of_step, searched))
            rows.append((kept_s / best_s - 1, other_s / best_s - 1))
            print(f"  {f'{name} x {factor:g}':<34}{seconds(kept_s)}{seconds(best_s)}{lost(*rows[-1])}", flush=True)
    near = [sum(row[which] <= NEAR for row in rows) for which in (0, 1)]
    print(f"  within {NEAR:.0%} of the best plan: {near[0]} of {len(rows)}; the unsearched one: {near[1]}")


def of_step(predicted: PredictedPlan) -> float:
    return predicted.prediction.seconds_per_step


def seconds(step_s: float) -> str:
    return f"{'no room' if step_s == inf else f'{step_s:.4g} s':>10}"


def lost(kept: float, other: float) -> str:
    return "".join(f"{'-' if more == inf else f'{more:+.1%}':>{width}}" for more, width in ((kept, 9), (other, 12)))


def step_of(planning: Planning, plan: Plan) -> float:
    """Predicted seconds of a step; where the plan has no room, infinite."""
    prediction = planning.predict(plan)
    return prediction.seconds_per_step if prediction.feasible else inf


if __name__ == "__main__":
    sys.exit(main())
