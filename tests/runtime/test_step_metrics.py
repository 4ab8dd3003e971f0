"""Means of a step over groups that come in any order."""

from __future__ import annotations

import itertools
import math

from plait.rewards.scores import GroupScores
from plait.runtime.step_metrics import by_function, exact_mean

GROUPS = [GroupScores(ticket, (), {"a": (0.1 * ticket, 0.7)}, (0.0, 0.0)) for ticket in range(1, 5)]


def test_the_mean_of_a_function_does_not_depend_on_which_group_came_first() -> None:
    means = {exact_mean(by_function(order)["a"]) for order in itertools.permutations(GROUPS)}
    assert means == {(0.1 + 0.2 + 0.3 + 0.4 + 4 * 0.7) / 8}
    naive = {sum(by_function(order)["a"]) for order in itertools.permutations(GROUPS)}
    assert len(naive) > 1, "these numbers tell orders apart"


def test_a_mean_is_exactly_rounded_and_0_of_none() -> None:
    assert exact_mean([1e16, 1.0, -1e16]) == 1 / 3
    assert exact_mean([]) == 0.0
    assert math.isnan(exact_mean([math.nan, 1.0]))
