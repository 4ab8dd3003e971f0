"""What training two roles by one schedule is predicted to take, held against RLHFuse's published configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from plait.cost.costs import CallCost
from plait.cost.pipelines import FILLING
from plait.dataflow import trace
from plait.layout.mesh import Layout
from plait.schedule.completion import complete
from plait.schedule.fused import FUSED
from plait.schedule.generators import one_f_one_b
from plait.schedule.pipeline import fused_workload
from plait.schedule.plan import Placement, Plan
from plait.schedule.schedule import Schedule
from plait.simulator.joint_orders import shares_of, taken_together_s
from plait.simulator.places import Places
from plait.simulator.step_graph import StepGraph
from plait.simulator.steps import places_of, predict
from tests.simulator.stand_in_costs import StandIn
from tests.simulator.test_steps import MODELS

# Stages and micro-batches of both roles, seconds of a forward, the bound and the time of the best schedule (paper notes
# A6; all but one reach the bound).
PUBLISHED = (
    ((8, 4), (32, 16), (5, 4), 708),
    ((8, 4), (16, 8), (5, 4), 372),
    ((8, 4), (8, 4), (5, 4), 225),
    ((8, 8), (32, 32), (5, 2), 702),
    ((8, 8), (16, 16), (5, 2), 366),
    ((8, 8), (8, 8), (5, 2), 225),
    ((16, 8), (64, 32), (2, 2), 618),
    ((16, 8), (32, 16), (2, 2), 330),
    ((16, 8), (16, 8), (2, 2), 186),
    ((16, 16), (64, 64), (2, 1), 606),
    ((16, 16), (32, 32), (2, 1), 318),
    ((16, 16), (16, 16), (2, 1), 186),
)


@dataclass(frozen=True)
class Pipelines(StandIn):
    """Stages alike, whose forward takes what `work` says, and a backward twice as long. A mini-batch of each role."""

    counts: Mapping[str, int] = field(default_factory=dict)
    """Training call → micro-batches of a copy."""

    def call(self, call, mode, layout: Layout, **options) -> CallCost:
        found = super().call(call, mode, layout, **options)
        if mode != "train":
            return found
        busy_s = 3 * self.work[call] * self.counts[call]
        filling_s = 3 * self.work[call] * (layout.parallelism.pp - 1)
        return replace(found, seconds=busy_s + filling_s, terms={"layers": busy_s, FILLING: filling_s})

    def stage_seconds(self, call: str, layout: Layout, micro_batches: int) -> list[tuple[float, float]]:
        return [(self.work[call], 2 * self.work[call])] * layout.parallelism.pp


def flow():
    def once(prompts, actor, critic):
        samples = actor.generate(prompts)
        values = critic.values(samples)
        actor.train(samples, loss=lambda batch, values: batch, values=values)
        critic.train(samples, loss=lambda batch, values: batch, values=values)

    return trace(once, roles=("actor", "critic"))


def setting(stages, counts, forward_s, schedules: tuple[Schedule, ...] = ()) -> tuple[Plan, Pipelines]:
    """The critic's pipelines run the other way, side by side where they are shorter."""
    (first, second), ranks = stages, max(stages)
    others = [rank for copy in range(0, ranks, second) for rank in reversed(range(copy, copy + second))]
    trained = (
        Placement("actor.train", "train", tuple(range(ranks)), pp=first, stages=(1,) * first, schedule=FUSED),
        Placement(
            "critic.train",
            "train",
            tuple(others),
            dp=ranks // second,
            pp=second,
            stages=(16 // second,) * second,
            schedule=FUSED,
        ),
    )
    work = {"actor.generate": 0.1, "critic.values": 0.1, "actor.train": forward_s[0], "critic.train": forward_s[1]}
    micro_batches = {"actor.train": counts[0], "critic.train": counts[1]}
    costs = Pipelines(work, {"actor": 10, "critic": 10}, devices=ranks, memory=10**9, counts=micro_batches)
    plan = complete(Plan("published", ranks, trained, schedules=schedules), flow(), MODELS, "plan")
    return plan, costs


def trained_s(plan: Plan, costs: Pipelines) -> float:
    calls = predict(plan, StepGraph.of(flow(), MODELS), costs).calls
    (seconds,) = {one.seconds for one in calls if one.kind == "TRAIN"}
    return seconds


@pytest.mark.parametrize(("stages", "counts", "forward_s", "best"), PUBLISHED)
def test_an_order_that_is_yet_to_be_found_takes_what_the_best_one_does(stages, counts, forward_s, best) -> None:
    plan, costs = setting(stages, counts, forward_s)
    places = places_of(plan, Places(StepGraph.of(flow(), MODELS), costs, plan.num_ranks))
    trained = [(place, place.costs) for place in places if place.placements[0].mode == "train"]
    assert taken_together_s(trained, {}) == pytest.approx(best)
    work_s = sum(3 * count * forward for count, forward in zip(counts, forward_s, strict=True))
    assert taken_together_s(trained, {FUSED: 1.5}) == pytest.approx(1.5 * work_s)


def test_a_stated_order_takes_as_long_as_it_does() -> None:
    """Two stages, two micro-batches each; forwards of 1 and 2 s, backwards of 2 and 4 s. The work of both is 18 s, and
    the first stage of each role is on a rank of its own. By 1F1B, the critic behind the actor, the actor's last rank
    has done its share after 7 s, the other after 9 s. There the critic begins with two forwards until 11 s; its four
    actions on the other one end at 21 s, and the last backward at 25 s."""
    open_plan, costs = setting((2, 2), (2, 2), (1, 2))
    assert trained_s(open_plan, costs) == pytest.approx(18)
    workload = fused_workload((2, 2), (2, 2), (1.0, 2.0), models=("actor", "critic"))
    serial = replace(one_f_one_b(workload), name=FUSED)
    plan, _ = setting((2, 2), (2, 2), (1, 2), (serial,))
    assert shares_of(open_plan, costs) == {}
    assert shares_of(plan, costs) == pytest.approx({FUSED: 25 / 18})
    assert trained_s(plan, costs) == pytest.approx(25)
