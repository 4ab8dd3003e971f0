"""What a recipe's `partial_rollout` says of samples that are running when new weights come."""

from __future__ import annotations

from typing import Literal

import pytest

from plait.schedule.update_rule import HeldKV, UpdateRule


@pytest.mark.parametrize(
    ("stated", "rule", "waits", "keeps"),
    [
        ("off", UpdateRule(), True, False),
        ("recompute", UpdateRule("recompute"), False, False),
        ("keep", UpdateRule("keep"), False, True),
    ],
)
def test_each_word_of_the_key_is_a_rule(
    stated: Literal["off"] | HeldKV, rule: UpdateRule, waits: bool, keeps: bool
) -> None:
    assert UpdateRule.of(stated) == rule
    assert (rule.waits, rule.keeps) == (waits, keeps)
