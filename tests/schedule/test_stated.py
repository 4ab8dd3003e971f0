"""Orders that a plan states: what they become for more and fewer micro-batches, and what is refused. No torch."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.dataflow import trace
from plait.errors import ConfigError, DataError
from plait.schedule.completion import complete
from plait.schedule.generators import gpipe, one_at_a_time, one_f_one_b
from plait.schedule.named_plans import PlannedModel
from plait.schedule.placements import placements_of
from plait.schedule.plan import Placement, Plan
from plait.schedule.schedule import Schedule, parse, with_transfers
from plait.schedule.stated import StatedOrder, stated_order
from plait.schedule.training_order import RuleOrder
from plait.schedule.validate import validate
from tests.schedule.workloads import never, workload

MINE = parse("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n", "mine")


def test_as_many_micro_batches_as_it_names_run_in_its_order() -> None:
    order = stated_order(MINE, "actor", 2)
    assert (order.name, order.num_micro_batches, order.held) == ("mine", 2, (2, 1))
    assert order(workload(2, 2, copy=1)).ids() == (
        ("actor/1:0F0", "actor/1:0F1", "actor/1:0B0", "actor/1:0B1"),
        ("actor/1:1F0", "actor/1:1B0", "actor/1:1F1", "actor/1:1B1"),
    )


def test_more_run_in_rounds_and_fewer_leave_out_by_hand() -> None:
    order = stated_order(MINE, "actor", 2)
    assert order(workload(2, 3, "")).ids() == (
        ("0F0", "0F1", "0B0", "0B1", "0F2", "0B2"),
        ("1F0", "1B0", "1F1", "1B1", "1F2", "1B2"),
    )
    assert order(workload(2, 1, "")).ids() == (("0F0", "0B0"), ("1F0", "1B0"))


@given(st.sampled_from([gpipe, one_f_one_b, one_at_a_time]), st.integers(2, 4), st.integers(1, 6), st.integers(1, 14))
def test_an_order_is_valid_for_any_number_of_micro_batches(rule, num_stages: int, stated: int, count: int) -> None:
    order = stated_order(rule(workload(num_stages, stated)), "actor", num_stages)
    asked = workload(num_stages, count)
    validate(order(asked), asked)
    if stated == count:
        assert order(asked).ids() == rule(asked).ids()


ROWS = {
    "stages": ("rank 0: 0F0 0B0\n", "expected a row for each of 2 pipeline stages, found 1"),
    "missing": ("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1B0 1F1\n", "1B1"),
    "doubled": ("rank 0: 0F0 0F0 0B0\nrank 1: 1F0 1B0\n", "0F0 is on rank 0 and again on rank 0"),
    "elsewhere": ("rank 0: 1F0 1B0\nrank 1: 0F0 0B0\n", "0F0 is on rank 1; its stage is on rank 0"),
    "order": ("rank 0: 0F1 0F0 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1\n", "micro-batches keep order"),
    "deadlock": ("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1\n", "deadlock: 0B0 .* waits for 1B0"),
    "far": (
        "rank 0: 0F0 0B0\nrank 1: 1F0 1B9999999999\n",
        "1B9999999999 in row 1: expected micro-batches numbered from",
    ),
    "model": (
        "rank 0: critic:0F0 critic:0B0\nrank 1: critic:1F0 critic:1B0\n",
        "critic:0F0 .* expected actions of actor",
    ),
    "two": ("rank 0: 0F0 actor:0B0\nrank 1: 1F0 1B0\n", "actor:0B0 in row 0: expected actions of actor alone"),
    "copy": ("rank 0: actor/1:0F0 actor/1:0B0\nrank 1: actor/1:1F0 actor/1:1B0\n", "every copy follows them"),
    "kind": ("rank 0: 0F0 0B0 0STEP\nrank 1: 1F0 1B0\n", "0STEP in row 0: expected forwards and backwards"),
    "round": ("rank 0: 0F0.1 0B0\nrank 1: 1F0 1B0\n", "0F0.1 in row 0: expected forwards and backwards"),
    "waits": (
        "rank 0: 0F0 0F1<1F0 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n",
        "0F1 in row 0 waits for 1F0; a stage waits for",
    ),
    "nothing": ("rank 0:\nrank 1:\n", "expected actions, found none"),
}


@pytest.mark.parametrize("case", ROWS)
def test_what_is_no_order_is_refused(case: str) -> None:
    text, message = ROWS[case]
    with pytest.raises(DataError, match=message):
        stated_order(parse(text), "actor", 2)


def test_transfers_are_not_listed() -> None:
    with pytest.raises(DataError, match=r"0SEND_F0 in row 0: .* sent and received without being listed"):
        stated_order(with_transfers(MINE), "actor", 2)


def flow(prompts, actor, critic):
    samples = actor.generate(prompts)
    actor.train(samples, loss=never)
    critic.train(samples, loss=never)


FLOW = trace(flow, roles=("actor", "critic"))
MODELS = {role: PlannedModel(role == "critic", 100, 4) for role in ("actor", "critic")}
TRAIN = Placement("actor.train", "train", (0, 1), pp=2, schedule="mine")


def completed(*placements: Placement, schedules: tuple[Schedule, ...] = (MINE,)) -> Plan:
    return complete(Plan("file", 4, placements, schedules), FLOW, MODELS, "here")


def test_a_placement_follows_the_schedule_that_it_names() -> None:
    plan = completed(TRAIN, Placement("critic.train", "train", (3, 2), pp=2, schedule="gpipe"))
    assert placements_of(plan, "actor").order == stated_order(MINE, "actor", 2)
    assert placements_of(plan, "critic").order == RuleOrder("gpipe")
    assert [placements_of(plan, role).together for role in ("actor", "critic")] == [None, None]
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert complete(again, FLOW, MODELS, "here") == plan


@pytest.mark.parametrize(
    ("placements", "schedules", "message"),
    [
        ((Placement("actor.train", "train", (0, 1), pp=2),), (MINE,), r"schedules\[0\]: no call follows `mine`"),
        (
            (TRAIN,),
            (),
            r"placements\[0\].schedule: expected 1F1B, gpipe, one at a time, fused or a name in `schedules`, found",
        ),
        (
            (TRAIN,),
            (MINE, Schedule(MINE.rows, "gpipe")),
            r"schedules\[1\].name: expected a name of its own, .* found `gpipe`",
        ),
        (
            (TRAIN, Placement("critic.train", "train", (0, 1, 2, 3), pp=4, schedule="mine")),
            (MINE,),
            r"schedules\[0\] `mine`, which critic.train follows: expected a row for each of 4 pipeline stages, found 2",
        ),
        (
            (Placement("actor.train", "train", (0, 1), dp=2, schedule="mine"),),
            (MINE,),
            r"placements\[0\].schedule: only train with pp",
        ),
    ],
)
def test_a_plan_that_contradicts_its_schedules_is_refused(placements, schedules, message: str) -> None:
    with pytest.raises(ConfigError, match="here: " + message):
        completed(*placements, schedules=schedules)


def test_the_plan_of_the_manual_is_one() -> None:
    """With one micro-batch more in flight on both stages than 1F1B has."""
    manual = (Path(__file__).parents[2] / "docs" / "plans.md").read_text()
    text = next(block for block in re.findall(r"```json\n(.*?)```", manual, re.DOTALL) if '"mine"' in block)
    order = placements_of(complete(Plan.from_json(text), FLOW, MODELS, "manual"), "actor").order
    assert isinstance(order, StatedOrder)
    assert (order.num_micro_batches, order.held) == (4, (3, 2))


def test_a_file_of_the_planner_is_a_part_of_a_plan_as_it_is() -> None:
    """`plait schedule --out` writes what stands in `schedules`."""
    written = one_f_one_b(workload(2, 4)).to_json()
    record = {"format": "plait-plan", "version": 1, "name": "p", "num_ranks": 4, "schedules": [json.loads(written)]}
    plan = Plan.from_json(json.dumps(record))
    assert stated_order(plan.schedules[0], "actor", 2).num_micro_batches == 4
