"""Samples of a rollout as they end."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

from plait.data.experts import Experts
from plait.runtime.steps.partial_rollout import PartialRollout
from tests.runtime.samples import prompt, sample


def test_a_prompts_experts_do_not_depend_on_who_ends_first() -> None:
    """They are those of the first sample, by index, that says any; what it says of its response stays its own."""
    told = [None, Experts(b"b", b"1"), Experts(b"c", b"2")]
    samples = [replace(sample(4, index), experts=experts) for index, experts in enumerate(told)]
    for order in permutations(samples):
        rollout = PartialRollout([prompt(4)], 3)
        *before, group = [rollout.take(one) for one in order]
        assert before == [None, None]
        assert group == rollout.whole[0]
        assert [one.experts for one in group] == [None, Experts(b"b", b"1"), Experts(b"b", b"2")]
