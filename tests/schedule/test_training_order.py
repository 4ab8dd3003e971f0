"""Orders of a role that trains by itself: each of them keeps what `TrainingOrder` promises. No torch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.schedule.generators import gpipe, in_flight, one_at_a_time, one_f_one_b
from plait.schedule.stated import stated_order
from plait.schedule.training_order import SCHEDULES, RuleOrder, TrainingOrder, rule_named
from plait.schedule.validate import validate
from tests.schedule.workloads import workload


def orders(num_stages: int) -> list[TrainingOrder]:
    """The rules, and each stated as an order of three micro-batches."""
    rules = [RuleOrder(name) for name in SCHEDULES]
    return [*rules, *(stated_order(rule(workload(num_stages, 3)), "actor", num_stages) for rule in rules)]


def test_rules_by_their_names() -> None:
    asked = workload(3, 4)
    made = [RuleOrder(name)(asked) for name in SCHEDULES]
    assert made == [one_f_one_b(asked), gpipe(asked), one_at_a_time(asked)]
    assert [schedule.name for schedule in made] == list(SCHEDULES)


def test_micro_batches_in_flight_by_hand() -> None:
    """The second of four stages, of eight micro-batches or of two."""
    names = ("", "fused", "1F1B", "gpipe", "one at a time")
    assert [rule_named(name).in_flight(1, 4, 8) for name in names] == [3, 3, 3, 8, 1]
    assert [rule_named(name).in_flight(1, 4, 2) for name in names] == [2, 2, 2, 2, 1]


@pytest.mark.parametrize("number", range(2 * len(SCHEDULES)))
@given(st.integers(2, 5), st.integers(1, 9))
def test_a_schedule_is_valid_and_holds_no_more_than_its_order_says(number: int, num_stages: int, count: int) -> None:
    order, asked = orders(num_stages)[number], workload(num_stages, count)
    schedule = order(asked)
    validate(schedule, asked)
    said = [order.in_flight(stage, num_stages, count) for stage in range(num_stages)]
    held = [most["actor"] for most in in_flight(schedule)]
    if order.num_micro_batches is None or count >= order.num_micro_batches:
        assert held == said
    else:  # an order that is stated says what it holds of all its micro-batches
        assert all(most <= stated for most, stated in zip(held, said, strict=True))
