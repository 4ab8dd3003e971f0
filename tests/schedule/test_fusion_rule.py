"""What a recipe's `fusion` says, and what a plan makes of it."""

from __future__ import annotations

from typing import Literal

import pytest

from plait.schedule.fusion_rule import FusionRule
from plait.schedule.plan import FUSION, Plan, PolicyChoice

PLAIN, LETS = Plan("plain", 2), Plan("lets", 2, policies=(PolicyChoice(FUSION),))


@pytest.mark.parametrize(
    ("said", "rule", "may", "of_plans"),
    [
        ("auto", FusionRule(is_open=True), True, [False, True]),
        ("off", FusionRule(), False, [False, False]),
        (0.5, FusionRule(share=0.5), True, [True, True]),
    ],
)
def test_what_is_scored_together_follows_from_recipe_and_plan(
    said: float | Literal["auto", "off"], rule: FusionRule, may: bool, of_plans: list[bool]
) -> None:
    assert FusionRule.of(said) == rule
    assert rule.is_stated == (said == 0.5)
    assert rule.may_fuse == may
    assert [plan.fuses(rule) for plan in (PLAIN, LETS)] == of_plans
