"""Plans over devices of several kinds: layers by the speed of stages, room by the memory of each rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.cost.cluster import ClusterSpec, NodeKind
from plait.cost.model_costs import ModelCosts
from plait.layout.mesh import Parallelism
from plait.planner.plan_leaders import Candidate
from plait.planner.plan_objective import Objective, Valued
from plait.planner.plan_problem import PlanProblem, RoleFacts
from plait.planner.plan_search import Budget, SearchResult, search
from plait.planner.plan_space import PlanSpace
from plait.planner.slot_forms import undominated
from plait.schedule.fused import FUSED
from plait.simulator.step_graph import Rollouts, StepGraph
from plait.simulator.steps import predict
from tests.cost.test_kinds_of_devices import FAST_NODE as TWICE_AS_FAST
from tests.cost.test_kinds_of_devices import SLOW_NODE as HALF_AS_FAST
from tests.cost.test_model_costs import SHAPE, SOFTWARE, WORK
from tests.planner.test_plan_search import SMALL, plan_of

ROLES = ("actor", "ref")


def with_memory(kind: NodeKind, num_bytes: int) -> NodeKind:
    return replace(kind, device=replace(kind.device, memory_bytes=num_bytes))


FAST_NODE, SLOW_NODE = with_memory(TWICE_AS_FAST, 4 << 30), with_memory(HALF_AS_FAST, 2 << 30)
WHOLE = (0, 1, 2, 3)


def problem(*kinds: NodeKind) -> PlanProblem:
    """Two roles of the four layers of `SHAPE`, on nodes of two devices."""
    cluster = ClusterSpec.of_kinds(kinds, 2, "mixed", SOFTWARE)
    graph = StepGraph.of(SMALL, ROLES, [], rollouts=Rollouts(4, 24, 1000))
    costs = ModelCosts(WORK, dict.fromkeys(ROLES, SHAPE), SMALL, cluster)
    facts = RoleFacts((1.0,) * SHAPE.layers, last=SHAPE.head_in_layers(1000), max_tp=2)
    return PlanProblem(graph, costs, dict.fromkeys(ROLES, facts), stage_works=costs.stage_works)


def slot_of(of: PlanProblem, mode: str) -> int:
    return next(n for n, slot in enumerate(of.graph.slots) if (slot.role, slot.mode) == ("actor", mode))


@pytest.mark.parametrize(
    ("kinds", "cut"),
    [((FAST_NODE, FAST_NODE), (3, 1)), ((FAST_NODE, SLOW_NODE), (3, 1)), ((SLOW_NODE, FAST_NODE), (2, 2))],
)
def test_layers_of_stages_go_by_the_speed_of_their_devices(kinds, cut) -> None:
    """Four layers and a head of 1.5625. At speeds 1 and 2 two layers take 2, and two with the head 1.78; three would
    take 3, and one leave 2.28 to the other. On one kind, or with the fast stage first, one layer is with the head."""
    of = problem(*kinds)
    for mode in ("train", "decode", "score"):
        forms = PlanSpace(of).forms.parallelisms(slot_of(of, mode), WHOLE)
        assert [sizes.stages for sizes in forms if (sizes.dp, sizes.tp, sizes.pp) == (1, 2, 2)] == [cut]
        # Of two copies, each is on one node: their stages are alike.
        assert [sizes.stages for sizes in forms if (sizes.dp, sizes.pp) == (2, 2)] == [(3, 1)]


def test_meshes_of_other_kinds_are_other_forms() -> None:
    of = problem(FAST_NODE, SLOW_NODE)
    forms, slot = PlanSpace(of).forms, slot_of(of, "train")
    fast, slow = forms.of(slot, (0, 1)), forms.of(slot, (2, 3))
    assert slow[0].seconds > 1.5 * fast[0].seconds
    alike = PlanSpace(problem(FAST_NODE, replace(FAST_NODE, nodes=1))).forms
    assert alike.of(slot, (0, 1)) is alike.of(slot, (2, 3))


def test_the_second_of_a_pair_has_its_layers_by_the_devices_that_its_stages_are_on() -> None:
    """Its first stage is where the other has its last: with the slow node first the one that goes with the ranks has
    layers 2 and 2, and the one that goes against them 3 and 1, as on a cluster with the fast node first."""
    of = replace(problem(SLOW_NODE, FAST_NODE), pairs=(("actor", "ref"),))
    space, slot = PlanSpace(of), slot_of(of, "train")
    [sizes] = [one for one in space.forms.parallelisms(slot, WHOLE) if (one.dp, one.tp, one.pp) == (1, 2, 2)]
    assert sizes.stages == (2, 2)
    pair = space.together(space.place(slot, WHOLE, space.forms.form_of(slot, WHOLE, sizes)), slot, 2)
    assert pair is not None
    one, other = (place.placements[0] for place in pair)
    assert (one.ranks, one.stages, one.schedule) == (WHOLE, (2, 2), FUSED)
    assert (other.ranks, other.stages, other.schedule) == ((2, 3, 0, 1), (3, 1), FUSED)
    places = [space.place(n, WHOLE, space.forms.form_of(n, WHOLE, sizes)) for n in range(len(of.graph.slots))]
    places[slot] = pair[1]
    again = space.apart(places)[slot].placements[0]
    assert (again.ranks, again.stages, again.schedule) == (WHOLE, (2, 2), ""), "each stage is on other devices"


def test_of_one_kind_stages_stay_whichever_way_they_go() -> None:
    of = problem(replace(FAST_NODE, nodes=2))
    space, slot = PlanSpace(of), slot_of(of, "train")
    [sizes] = [one for one in space.forms.parallelisms(slot, WHOLE) if (one.dp, one.tp, one.pp) == (1, 2, 2)]
    places = [space.place(n, WHOLE, space.forms.form_of(n, WHOLE, sizes)) for n in range(len(of.graph.slots))]
    stated = replace(sizes, stages=(1, 3))
    places[slot] = space.place(slot, (2, 3, 0, 1), space.forms.form_of(slot, (2, 3, 0, 1), stated, FUSED))
    again = space.apart(places)[slot].placements[0]
    assert (again.ranks, again.stages, again.schedule) == (WHOLE, (1, 3), "")


def test_on_mixed_meshes_a_form_beats_another_by_shares_of_room() -> None:
    """Three layers on the fast stage and one on the slow one leave less room than two and two: two layers are half of
    all on a device of half the memory. Fewer bytes of the fullest stage leave it no more room."""
    of = problem(FAST_NODE, SLOW_NODE)
    space, slot = PlanSpace(of), slot_of(of, "train")
    process = sum(of.costs.process_terms.values())
    forms = [space.forms.form_of(slot, WHOLE, Parallelism(1, 2, 2, cut)) for cut in ((3, 1), (2, 2))]
    for form in forms:
        rooms = [(4 << 30) - process, (2 << 30) - process]
        held = [weights + state for weights, state in zip(form.asked.held, form.asked.state, strict=True)]
        assert form.static_bytes == max(held)
        assert form.fullest[0] == max(needed / room for needed, room in zip(held, rooms, strict=True))
    assert forms[0].static_bytes > forms[1].static_bytes
    assert forms[0].fullest[0] < forms[1].fullest[0]
    wider = replace(forms[1], seconds=forms[0].seconds)
    assert undominated([wider, forms[0]]) == [forms[0]]
    fast = PlanSpace(problem(replace(FAST_NODE, nodes=2))).forms.of(slot, WHOLE)
    assert all(form.fullest == (form.static_bytes, form.active_bytes) for form in fast)


def test_each_rank_has_the_memory_of_its_own_device() -> None:
    """The slow node has not even room for a process: nothing has a form there, and the fast one is as it was."""
    of = problem(FAST_NODE, with_memory(SLOW_NODE, 1 << 29))
    forms, slot = PlanSpace(of).forms, slot_of(of, "train")
    assert forms.of(slot, (0, 1))
    assert not forms.of(slot, (2, 3))
    assert not forms.of(slot, WHOLE)
    assert search(of, Budget(50), seed=1).best is None


def test_what_is_said_of_a_rank_is_of_its_own_device() -> None:
    of = problem(FAST_NODE, SLOW_NODE)
    best = search(of, Budget(200), seed=1)
    memory = predict(plan_of(best, of, SMALL), of.graph, of.costs).memory
    assert [rank.limit_bytes for rank in memory] == [4 << 30, 4 << 30, 2 << 30, 2 << 30]
    assert all(rank.fits for rank in memory)


def test_excess_is_of_the_rank_that_has_least_room_for_what_it_holds() -> None:
    """Whole models everywhere: the slow ranks hold as much as the fast ones, in half of that."""
    of = problem(FAST_NODE, SLOW_NODE)
    space = PlanSpace(of)
    sizes = next(sizes for sizes in space.forms.parallelisms(0, WHOLE) if sizes.dp == 4)
    forms = [space.forms.form_of(slot, WHOLE, sizes) for slot in range(len(of.graph.slots))]
    places = tuple(space.place(slot, WHOLE, form) for slot, form in enumerate(forms))
    best = Candidate(places, Valued(0.0, 0.0, 0.0, 0))
    plan = plan_of(SearchResult(best, best, (), (), 0, 0.0, (), "asked"), of, SMALL)
    peak = max(rank.peak_bytes for rank in predict(plan, of.graph, of.costs).memory)
    tight = problem(FAST_NODE, with_memory(SLOW_NODE, peak // 2))
    assert Objective(tight)(places).excess == pytest.approx(1.0, rel=1e-6)


def test_a_search_over_both_kinds_is_deterministic_and_finds_what_lies_between() -> None:
    fast, slow = (problem(replace(kind, nodes=2)) for kind in (FAST_NODE, SLOW_NODE))
    both = problem(FAST_NODE, SLOW_NODE)
    best = [search(of, Budget(200), seed=0).best for of in (fast, both, both, slow)]
    seconds = [candidate.valued.seconds for candidate in best if candidate is not None]
    assert seconds[0] < seconds[1] == seconds[2] < seconds[3]


def test_one_kind_is_judged_as_before_whatever_way_it_is_listed() -> None:
    plain, listed = problem(replace(FAST_NODE, nodes=2)), problem(FAST_NODE, FAST_NODE)
    found = [search(of, Budget(150), seed=2) for of in (plain, listed)]
    assert found[0].best is not None
    assert found[1].best is not None
    assert found[0].best.valued == found[1].best.valued
    assert found[0].trace == found[1].trace
