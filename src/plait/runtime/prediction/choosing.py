"""Which plan is taken of those that a search tried, and beside which others it is shown: each of them predicted as a
run would follow it. A search itself values by less: scoring in parts wherever it may be, and on many devices a bound
for moves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from plait.cost.move_bound import LARGE
from plait.cost.rank_order import better_orders
from plait.errors import ConfigError, UserError
from plait.planner.collecting import collecting_seldom
from plait.planner.plan_baselines import baselines
from plait.planner.plan_leaders import State
from plait.planner.plan_objective import weighed_s
from plait.planner.plan_search import Budget, SearchResult, Stop, search
from plait.runtime.prediction.misfit import check_processes, misfit, too_large
from plait.runtime.prediction.planning import Planning
from plait.schedule.named_plans import AUTO, BASELINES, NAMES
from plait.schedule.plan import Placement, Plan
from plait.simulator.steps import Prediction, places_of

AUTO_EVALUATIONS = 3000
"""Plans that a run tries: a number, not seconds, so that all of its processes find the same."""
MOST_ALTERNATIVES = 3
STARTS = "found with other keys"
"""Name of a plan that a search begins from."""


@dataclass(frozen=True)
class PredictedPlan:
    """A plan and what it will take; `name` is its title among others."""

    name: str
    plan: Plan
    prediction: Prediction


@dataclass(frozen=True)
class Choice:
    """
    best:         the plan that was found, or given
    alternatives: the next plans of a search, each unlike those before; none is faster than `best`
    baselines:    named plans, and those that others would make; of those that fit none is faster than a `best` that was
                  found
    evaluations:  plans that were valued, in so many seconds
    stopped_by:   None: nothing was searched
    """

    best: PredictedPlan
    alternatives: tuple[PredictedPlan, ...]
    baselines: tuple[PredictedPlan, ...]
    evaluations: int
    seconds: float
    stopped_by: Stop | None = None


@collecting_seldom()
def choose(planning: Planning, budget: Budget, seed: int = 0, *, name: str = "found") -> Choice:
    """The best plan that a search finds: its leaders and the baselines are predicted exactly, and the best of these is
    taken. Of plans in which roles train together that is one which gains `LEAST_FUSED_GAIN` over the others.

    Args:
        name: of the plan.

    Raises:
        ConfigError: none fits in memory; says what is too large.
    """
    began = budget.clock()
    result = searched(planning, budget, seed)
    # Messages of moves over many devices take seconds to plan: there no more leaders are predicted than are shown.
    leaders = _leaders(planning, result, 1 + MOST_ALTERNATIVES)
    usable = [baseline.places for baseline in result.baselines if baseline.valued.usable]
    ranked = _ranked(planning, result, dict.fromkeys((*leaders, *usable)), name, budget.tell)
    (_, best), *others = _in_better_orders(planning, ranked, budget.tell)
    least_s = best.prediction.seconds_per_step
    # Those that are faster train roles together, and gain too little by that.
    next_best = [plan for places, plan in others if places in leaders and plan.prediction.seconds_per_step >= least_s]
    made = {baseline.name: baseline.places for baseline in result.baselines}
    return Choice(
        best,
        tuple(replace(plan, name=f"plan {n}") for n, plan in enumerate(_otherwise(best, next_best), start=2)),
        _predicted_baselines(planning, made, budget.tell, dict(ranked)),
        result.evaluations,
        budget.clock() - began,
        result.stopped_by,
    )


def searched(
    planning: Planning, budget: Budget, seed: int, given: Mapping[str, Plan] = MappingProxyType({})
) -> SearchResult:
    """Baselines are the named plans, those that others would make, and those of the given ones that can be followed.

    Raises:
        ConfigError: processes have no room by themselves.
    """
    check_processes(planning)
    plans = dict(planning.named)
    for name, plan in given.items():
        with contextlib.suppress(UserError):
            plans[name] = planning.followable(plan)
    starts = [(name, tuple(places_of(plan, planning.space.places))) for name, plan in plans.items()]
    return search(planning.space.problem, budget, seed=seed, given=starts, space=planning.space)


def _otherwise(best: PredictedPlan, others: list[PredictedPlan]) -> list[PredictedPlan]:
    """Plans that are shown beside the best: such as have calls elsewhere or cut otherwise than all before them; where
    these are few, also such as differ in nothing but what becomes of weights between calls.

    Args:
        others: the fastest first, as are those that are returned.
    """
    first_of: dict[frozenset[Placement], int] = {_where(best): -1}
    for number, plan in enumerate(others):
        first_of.setdefault(_where(plan), number)
    unlike = list(first_of.values())[1:]
    alike = [number for number in range(len(others)) if number not in unlike]
    return [others[number] for number in sorted([*unlike, *alike][:MOST_ALTERNATIVES])]


def _where(plan: PredictedPlan) -> frozenset[Placement]:
    return frozenset(replace(placement, after="keep") for placement in plan.plan.placements)


@collecting_seldom()
def choose_best(planning: Planning, budget: Budget, seed: int, start: Plan | None = None) -> PredictedPlan:
    """The best plan that a search finds, with nothing beside it; over many devices the one that its measure puts first.

    Args:
        start: the plan of a recipe with other keys. Where it can be followed with these as well, the search begins from
            it, and what it finds is no slower.

    Raises:
        ConfigError: none fits in memory; says what is too large.
    """
    given = {} if start is None else {STARTS: start}
    result = searched(planning, budget, seed, given)
    starts = [other.places for other in result.baselines if other.name in given]
    plans = dict.fromkeys((*_leaders(planning, result, 1), *starts))
    ranked = _ranked(planning, result, plans, "found", budget.tell)
    return _in_better_orders(planning, ranked, budget.tell)[0][1]


def _leaders(planning: Planning, result: SearchResult, most: int) -> list[State]:
    """Places of the best plans of each kind; on many devices of at most so many kinds. Of those that a run follows in
    the same way, as they differ in words that change nothing, the first."""
    many, unlike = planning.cluster.num_devices > LARGE, dict[State, State]()
    for leader in result.leaders:
        unlike.setdefault(planning.space.plain(leader.places), leader.places)
    return list(unlike.values())[: most if many else len(unlike)]


def _ranked(
    planning: Planning, result: SearchResult, plans: Collection[State], name: str, tell: Callable[[str], None]
) -> list[tuple[State, PredictedPlan]]:
    """Those of some plans that fit, predicted, the best first. Raises ConfigError where none does."""
    ranked: list[tuple[float, State, PredictedPlan]] = []
    for number, places in enumerate(plans, start=1):
        tell(f"of the best plans, number {number} of {len(plans)} is predicted as a run would follow it")
        plan = planning.plan_of(places, name)
        prediction = planning.predict(plan)
        if prediction.feasible:
            ranked.append(
                (weighed_s(prediction.seconds_per_step, places), places, PredictedPlan(name, plan, prediction))
            )
    if not ranked:
        raise ConfigError(misfit(planning, result))
    return [(places, plan) for _, places, plan in sorted(ranked, key=lambda row: row[0])]


def _in_better_orders(
    planning: Planning, ranked: list[tuple[State, PredictedPlan]], tell: Callable[[str], None]
) -> list[tuple[State, PredictedPlan]]:
    """The plans, the best of them with less to move (`in_better_order`), and again the best first."""
    tell("orders of ranks are looked for in which less is moved")
    most = 1 if planning.cluster.num_devices > LARGE else 1 + MOST_ALTERNATIVES
    changed = [(places, in_better_order(planning, places, plan)) for places, plan in ranked[:most]]
    return sorted([*changed, *ranked[most:]], key=lambda row: weighed_s(row[1].prediction.seconds_per_step, row[0]))


def in_better_order(planning: Planning, places: State, plan: PredictedPlan) -> PredictedPlan:
    """A plan whose scoring and generation take their ranks in the order that keeps most of the trained weights where
    they are (`cost.rank_order`); as it was where that moves no less, or is predicted to take longer."""
    orders = {
        (better.placement.role, better.placement.mode, better.placement.ranks): better.ranks
        for better in better_orders(planning.recipe, planning.models, plan.plan, planning.parameters)
    }
    if not orders:
        return plan
    reordered = []
    for place in places:
        placements = [replace(p, ranks=orders.get((p.role, p.mode, p.ranks), p.ranks)) for p in place.placements]
        reordered.append(planning.space.places.place(place.slot, placements, place.asked))
    other = planning.plan_of(reordered, plan.name)
    prediction = planning.predict(other)
    if not prediction.feasible or prediction.seconds_per_step > plan.prediction.seconds_per_step:
        return plan
    return PredictedPlan(plan.name, other, prediction)


def predicted(planning: Planning, plan: Plan) -> PredictedPlan:
    """A plan that was given, under its own name."""
    return PredictedPlan(plan.name, plan, planning.predict(plan))


def beside_others(planning: Planning, plan: Plan, tell: Callable[[str], None]) -> Choice:
    """A plan that was given, beside the named plans and those that others would make.

    Args:
        tell: as of a `Budget`.
    """
    began = time.monotonic()
    given = predicted(planning, plan)
    others = _predicted_baselines(planning, baselines(planning.space), tell)
    seconds = time.monotonic() - began
    return Choice(given, (), others, 1 + len(others), seconds)


def _predicted_baselines(
    planning: Planning,
    made: Mapping[str, State],
    tell: Callable[[str], None],
    known: Mapping[State, PredictedPlan] = MappingProxyType({}),
) -> tuple[PredictedPlan, ...]:
    """
    Args:
        made: by title, plans that others would make.
        known: what has been predicted of some of them, under another name.
    """
    named = []
    for word, title in BASELINES.items():
        if title in made:
            tell(f"the plan {title} is predicted")
            same = known.get(made[title])
            if same is None:
                same = predicted(planning, planning.plan_of(made[title], word))
            named.append(PredictedPlan(title, replace(same.plan, name=word), same.prediction))
    for title, plan in planning.named.items():
        tell(f"the plan {title} is predicted")
        named.append(PredictedPlan(title, plan, planning.predict(plan)))
    return tuple(named)


def choose_for_run(planning: Planning, tell: Callable[[str], None] = lambda text: None) -> Choice:
    """What a run is told that leaves its plan to be found.

    Args:
        tell: as of a `Budget`.

    Raises:
        ConfigError: none fits in memory; says what is too large.
    """
    try:
        return choose(planning, Budget(AUTO_EVALUATIONS, tell=tell), planning.recipe.seed, name=AUTO)
    except ConfigError as error:
        raise _of_run(error) from None


def auto_plan(planning: Planning) -> Plan:
    """The plan of a run that leaves it to be found, with its predicted timeline.

    Raises:
        ConfigError: none fits in memory; says what is too large.
    """
    best = choose_for_run(planning).best
    return replace(best.plan, predicted=best.prediction.timeline)


def check_room(planning: Planning) -> None:
    """Raises ConfigError where it takes no search, and no seconds that were measured, to see that no plan has room."""
    try:
        check_processes(planning)
        if why := too_large(planning):
            raise ConfigError(why)
    except ConfigError as error:
        raise _of_run(error) from None


def _of_run(error: ConfigError) -> ConfigError:
    """Why no plan of a run can be found, and what else it can be told."""
    return ConfigError(f"`plan` auto: {error}, or set `plan` (to {NAMES[0]}, say), which is tried as it is")
