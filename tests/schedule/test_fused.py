"""Orders in which several roles train together: what they become, and what is refused. No torch."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.algorithms.ppo import PPOOptions, ppo
from plait.dataflow import Dataflow, trace
from plait.errors import ConfigError
from plait.planner.evaluate import score
from plait.planner.greedy import greedy
from plait.planner.tables import schedule_from, tables_of
from plait.schedule.completion import complete
from plait.schedule.fused import FusedOrder
from plait.schedule.joint_training import fused_calls
from plait.schedule.named_plans import PlannedModel
from plait.schedule.pipeline import Pipeline, Workload, fused_workload
from plait.schedule.placements import layouts_of, placements_of
from plait.schedule.plan import Placement, Plan
from plait.schedule.schedule import Schedule, parse
from plait.schedule.training_order import RuleOrder
from plait.schedule.validate import validate
from tests.training.schedules import shuffled

ROLES = ("actor", "ref", "reward", "critic")
MODELS = {"actor": PlannedModel(False), "ref": PlannedModel(False), "critic": PlannedModel(True)}

MINE = parse(
    """
rank 0: actor:0F0 critic:1F0 critic:1B0 actor:0B0
rank 1: critic:0F0 actor:1F0 actor:1B0 critic:0B0
""",
    "mine",
)


def flow(**options: Any) -> Dataflow:
    return trace(ppo, roles=ROLES, options=PPOOptions(**options))


def placed(actor: str, critic: str, schedule: str = "mine") -> tuple[Placement, Placement]:
    """`placed("0,1 pp2", "1,0 pp2")`."""

    def of(role: str, text: str) -> Placement:
        ranks, *sizes = text.split()
        numbers = tuple(int(rank) for rank in ranks.split(","))
        return Placement(f"{role}.train", "train", numbers, **{s[:2]: int(s[2:]) for s in sizes}, schedule=schedule)

    return of("actor", actor), of("critic", critic)


def plan_of(actor: str, critic: str, schedule: Schedule, num_ranks: int) -> Plan:
    return Plan("mine", num_ranks, placed(actor, critic), (replace(schedule, name="mine"),))


def order_of(actor: str, critic: str, schedule: Schedule, num_ranks: int) -> FusedOrder:
    done = complete(plan_of(actor, critic, schedule, num_ranks), flow(), MODELS, "here")
    actors, critics = (placements_of(done, role) for role in ("actor", "critic"))
    assert actors.together is not None
    assert actors.together == critics.together
    assert actors.trains_with == critics.trains_with == actors.together.roles
    return actors.together


def workload_of(order: FusedOrder, counts: dict[str, int], block: int = 0) -> Workload:
    pipelines = []
    for role, copy, rows in order.copies_in(block):
        table = ((1.0,) * counts[role],) * len(rows)
        pipelines.append(Pipeline(role, copy, rows, table, table, table))
    return Workload(tuple(pipelines), len(order.rows))


def test_both_run_in_its_order_and_rows_are_ranks() -> None:
    order = order_of("0,1 pp2", "1,0 pp2", MINE, 2)
    assert (order.roles, order.num_micro_batches) == (("actor", "critic"), {"actor": 1, "critic": 1})
    assert order.places == {("actor", 0): (0, 1), ("critic", 0): (1, 0)}
    assert (order.layout.mesh.ranks, str(order.layout.parallelism)) == ((0, 1), "dp1 tp1 pp2")
    assert order.in_flight == ({"actor": 1, "critic": 1}, {"actor": 1, "critic": 1})
    assert order(workload_of(order, {"actor": 1, "critic": 1})).ids() == MINE.ids()


def test_a_role_holds_what_it_may_hold_alone_or_with_the_other() -> None:
    """Alone by 1F1B, for which as many micro-batches are cut: the critic's first stage, on rank 1, has two in flight of
    two micro-batches, its last one; together each row has one of each role."""
    done = complete(plan_of("0,1 pp2", "1,0 pp2", MINE, 2), flow(), MODELS, "here")
    critic = placements_of(done, "critic")
    assert critic.order == RuleOrder("1F1B", num_micro_batches=1)
    assert [critic.in_flight(rank, 2) for rank in (1, 0)] == [2, 1]


def test_the_example_of_the_manual() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "plans.md").read_text()
    text = next(block for block in re.findall(r"```json\n(.*?)```", manual, re.DOTALL) if '"both"' in block)
    done = complete(Plan.from_json(text), flow(), MODELS, "manual")
    order = placements_of(done, "critic").together
    assert order is not None
    assert order.num_micro_batches == {"actor": 2, "critic": 2}
    workload = fused_workload((2, 2), (2, 2), (1.0, 1.0), models=("actor", "critic"))
    assert score(workload, done.schedules[0]).makespan == 12, "each rank has 4 forwards and 4 backwards, and no bubble"


def test_more_run_in_rounds_and_fewer_leave_out_by_hand() -> None:
    order = order_of("0,1 pp2", "1,0 pp2", MINE, 2)
    found = order(workload_of(order, {"actor": 2, "critic": 1}))
    assert found.ids()[0] == ("actor:0F0", "critic:1F0", "critic:1B0", "actor:0B0", "actor:0F1", "actor:0B1")
    assert order(workload_of(order, {"actor": 0, "critic": 1})).ids() == (
        ("critic:1F0", "critic:1B0"),
        ("critic:0F0", "critic:0B0"),
    )


def test_several_copies_beside_each_other_follow_it_on_their_ranks() -> None:
    """dp 2 and tp 2 beside it: eight ranks, the critic's in the opposite direction."""
    order = order_of("0,1,2,3,4,5,6,7 dp2 tp2 pp2", "2,3,0,1,6,7,4,5 dp2 tp2 pp2", MINE, 8)
    assert str(order.layout.parallelism) == "dp2 tp2 pp2"
    assert order.layout.mesh.ranks == tuple(range(8))
    assert order.copies_in(1) == (("actor", 1, (0, 1)), ("critic", 1, (1, 0)))
    workload = workload_of(order, {"actor": 1, "critic": 1}, block=1)
    assert order(workload).ids()[0] == ("actor/1:0F0", "critic/1:1F0", "critic/1:1B0", "actor/1:0B0")


def written(stages: tuple[int, int], counts: tuple[int, int]) -> Schedule:
    """As `plait schedule --engine greedy` writes it."""
    workload = fused_workload(stages, counts, (2.0, 3.0), models=("actor", "critic"))
    order = greedy(workload)
    assert order is not None
    return schedule_from(workload, tables_of(workload), order, "greedy")


def test_a_shorter_pipeline_runs_as_copies() -> None:
    order = order_of("0,1,2,3 pp4", "1,0,3,2 dp2 pp2", written((4, 2), (4, 2)), 4)
    assert order.num_copies("critic") == 2
    assert order.places["critic", 1] == (3, 2)
    assert order.num_micro_batches == {"actor": 4, "critic": 2}
    done = complete(plan_of("0,1,2,3 pp4", "1,0,3,2 dp2 pp2", written((4, 2), (4, 2)), 4), flow(), MODELS, "here")
    assert order.layout in layouts_of(done)


def test_a_copy_of_one_stage_each() -> None:
    order = order_of("0,1 pp2", "0,1 dp2", written((2, 1), (2, 1)), 2)
    assert order.places["critic", 1] == (1,)


@given(
    st.sampled_from([("0,1 pp2", "1,0 pp2", (2, 2)), ("0,1,2,3 pp4", "1,0,3,2 dp2 pp2", (4, 2))]),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_an_order_is_valid_for_any_numbers_of_micro_batches(where, stated, counts, seed: int) -> None:
    actor, critic, stages = where
    models = ("actor", "critic")
    schedule = shuffled(fused_workload(stages, stated, (1.0, 1.0), models=models), seed)
    order = order_of(actor, critic, schedule, max(stages))
    workload = workload_of(order, dict(zip(models, counts, strict=True)))
    validate(order(workload), workload)
    if counts == stated:
        assert order(workload).ids() == schedule.ids()


REFUSED: dict[str, tuple[str, str, Schedule, int, str]] = {
    "same direction": (
        "0,1 pp2",
        "0,1 pp2",
        MINE,
        2,
        r"expected `ranks` \[1, 0\] of critic, so that .* beside those of actor, found \[0, 1\]",
    ),
    "other ranks": ("0,1 pp2", "3,2 pp2", MINE, 4, r"expected `ranks` \[1, 0\] of critic"),
    "stages": ("0,1 pp2", "2,1,0 pp3", MINE, 3, "expected actions of 3 stages of critic, the `pp` .* found .* 0 and 1"),
    "dp": ("0,1,2,3 dp2 pp2", "1,0 pp2", MINE, 4, "expected `dp` 2 of critic beside dp 2 of actor"),
    "tp": ("0,1,2,3 tp2 pp2", "1,0,3,2 dp2 pp2", MINE, 4, "expected one `tp` of actor and critic, .* found 2 and 1"),
    "missing": (
        "0,1 pp2",
        "1,0 pp2",
        parse("rank 0: actor:0F0 critic:1F0 critic:1B0\nrank 1: critic:0F0 actor:1F0 actor:1B0 critic:0B0\n", "mine"),
        2,
        "actor:0B0 is missing",
    ),
    "deadlock": (
        "0,1 pp2",
        "1,0 pp2",
        parse(
            "rank 0: critic:1F0 actor:0F0 critic:1B0 actor:0B0\nrank 1: actor:1F0 critic:0F0 actor:1B0 critic:0B0\n",
            "mine",
        ),
        2,
        "deadlock",
    ),
    "copies": ("0,1,2,3 pp4", "1,0,3,2 dp2 pp2", written((4, 4), (4, 4)), 4, "expected actions of 2 stages of critic"),
    "a row without": (
        "0,1 pp2",
        "1,0 pp2",
        replace(MINE, rows=(*MINE.rows, ())),
        3,
        "expected every role in every row, found no action of actor in row 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_order_that_does_not_fit_is_refused(name: str) -> None:
    actor, critic, schedule, num_ranks, message = REFUSED[name]
    prefix = r"here: schedules\[0\] `mine`, which actor.train and critic.train follow: "
    with pytest.raises(ConfigError, match=prefix + message):
        complete(plan_of(actor, critic, schedule, num_ranks), flow(), MODELS, "here")


def test_every_role_in_it_follows_it() -> None:
    plan = Plan("mine", 2, placed("0,1 pp2", "1,0 pp2")[:1], (MINE,))
    with pytest.raises(ConfigError, match=r"which actor.train follows: critic is in it, but does not follow it"):
        complete(plan, flow(), MODELS, "here")
    third = Placement("ref.train", "train", (0, 1), pp=2, schedule="mine")
    with pytest.raises(ConfigError, match=r"has no call `ref.train`"):
        complete(Plan("mine", 2, (*placed("0,1 pp2", "1,0 pp2"), third), (MINE,)), flow(), MODELS, "here")


@pytest.mark.parametrize("options", [{"critic_warmup_steps": 3}, {"bootstrap_truncated": True}])
def test_a_critic_that_is_warmed_up_or_scores_may_train_together_with_its_actor(options: dict[str, Any]) -> None:
    complete(plan_of("0,1 pp2", "1,0 pp2", MINE, 2), flow(**options), MODELS, "here")


def unequal(prompts: Any, actor: Any, critic: Any, options: Any) -> None:
    samples = actor.generate(prompts)
    critic.train(samples, loss=nothing)
    values = critic.values(samples) if options["waits"] else samples.finished
    actor.train(samples, loss=nothing, epochs=options["epochs"], values=values)


def nothing(batch: Any, **columns: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 2, "waits": False}, "expected as many optimizer steps .* found critic.train 1, actor.train 2"),
        ({"epochs": 1, "waits": True}, "actor.train cannot train together with critic.train: the flow .* wait"),
    ],
)
def test_calls_that_cannot_train_together_are_refused(options: dict[str, Any], message: str) -> None:
    traced = trace(unequal, roles=("actor", "critic"), options=options)
    with pytest.raises(ConfigError, match=message):
        complete(plan_of("0,1 pp2", "1,0 pp2", MINE, 2), traced, MODELS, "here")


def twice(prompts: Any, actor: Any, critic: Any) -> None:
    samples = actor.generate(prompts)
    critic.train(samples, loss=nothing)
    actor.train(samples, loss=nothing)
    actor.train(samples, loss=nothing, old=actor.logprobs(samples))


def summed(prompts: Any, actor: Any, critic: Any) -> None:
    samples = actor.generate(prompts)
    actor.train(samples, loss=nothing, mini_batches=2, with_next=True)
    actor.train(samples, loss=nothing, epochs=2)
    critic.train(samples, loss=nothing, mini_batches=2)
    actor.train(samples, loss=nothing)


def test_calls_whose_gradients_meet_train_together_with_those_of_another_role() -> None:
    traced = trace(summed, roles=("actor", "critic"))
    groups = fused_calls(traced, ("actor", "critic"))
    assert [[node.call for node in group] for group in groups] == [["actor.train", "actor.train#2", "critic.train"]]
    complete(plan_of("0,1 pp2", "1,0 pp2", MINE, 2), traced, MODELS, "here")


def test_the_first_calls_of_all_train_together_and_a_second_one_alone() -> None:
    traced = trace(twice, roles=("actor", "critic"))
    groups = fused_calls(traced, ("actor", "critic"))
    assert [[node.call for node in group] for group in groups] == [["critic.train", "actor.train"]]
