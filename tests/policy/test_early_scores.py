"""Whether a rollout is scored in parts: by numbers that can be followed by hand, and what holds of any."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.policy.early_scores import predicted
from plait.policy.fusion_gate import RolloutSize
from plait.schedule.fusion_times import FusionTimes
from tests.cases import examples

THREE = RolloutSize(samples=3, instances=2, max_batch=8)
ALIKE = [(11,)]
"""Each response has eleven tokens: the prompt's step draws the first, ten steps the others."""
TIMES = FusionTimes(step_s=1.0, more_s=1.0, token_s=4 / 11, parts_s=1.0, prompt_tokens=0.0)
"""An instance with two samples ends after 20 s, one with a single sample after 10; a sample is scored in 4."""


def test_an_instance_that_ends_sooner_scores_meanwhile() -> None:
    """Without parts all ends at 20 + 3 · 4 / 2 = 26 s. With them one sample is scored from 10 s to 14 s, two by both
    instances from 20 s on: 24 s, and half a second of what parts take."""
    early = predicted(TIMES, ALIKE, THREE)
    assert (early.gain_s, early.of_s) == pytest.approx((1.5, 26.0))
    assert early.pays


def test_samples_beyond_an_instances_places_wait() -> None:
    """A step takes a second whatever runs. Side by side all end at 10 s and leave nothing to hide. One at a time, the
    instance with two ends at 20 s: 26 s without parts. With them the other scores from 10 s on, two samples until 18 s,
    and the third takes both 2 s: 22 s, and half a second of what parts take."""
    times = replace(TIMES, more_s=0.0)
    assert predicted(times, ALIKE, THREE).gain_s == pytest.approx(-0.5)
    early = predicted(times, ALIKE, replace(THREE, max_batch=1))
    assert (early.gain_s, early.of_s) == pytest.approx((3.5, 26.0))


@pytest.mark.parametrize(("parts_s", "pays"), [(2.0, True), (3.2, False), (4.0, False)])
def test_it_must_gain_two_percent(parts_s: float, pays: bool) -> None:
    """2 s less half of what parts take, of 26 s; with 2 s of parts nothing is lost either where all is a fifth off."""
    times = FusionTimes(1.0, 1.0, 4 / 11, parts_s, 0.0)
    assert predicted(times, ALIKE, THREE).pays is pays


def test_nothing_is_gained_where_a_fifth_decides() -> None:
    """Parts of 2.7 s: 2 − 1.35 s are more than two percent of 26, but where scores take a fifth less and parts a fifth
    more, 1.6 − 1.62 s are lost."""
    early = predicted(FusionTimes(1.0, 1.0, 4 / 11, 2.7, 0.0), ALIKE, THREE)
    assert (early.gain_s, early.pays) == (0.0, False)


def test_instances_that_end_together_leave_nothing_to_hide() -> None:
    early = predicted(TIMES, ALIKE, RolloutSize(samples=4, instances=2, max_batch=8))
    assert early.gain_s == pytest.approx(-0.5)
    assert not early.pays


def test_a_quarter_of_all_scores_is_behind_the_last_sample() -> None:
    """Scores of 40 s in all, and one instance that is idle for 100 s: what ends late is scored late. Each of three
    prompts' samples would be done at once, but 20 / 4 s stay."""
    times = FusionTimes(step_s=10.0, more_s=10.0, token_s=40 / 33, parts_s=0.0, prompt_tokens=0.0)
    early = predicted(times, ALIKE, THREE)
    whole_s = 200 + 40 / 2
    assert early.of_s == pytest.approx(whole_s)
    # One sample's 13.3 s are hidden; the two others take 13.3 s on both instances, which is more than a quarter.
    assert early.gain_s == pytest.approx(40 / 2 - 2 * 40 / 3 / 2)


def test_samples_of_a_prompt_wait_for_each_other() -> None:
    """Two prompts of two samples on two instances, all alike, end together; of three the instance with one prompt
    scores its two samples, once both have ended."""
    alone = predicted(TIMES, [(11, 11)], RolloutSize(samples=6, instances=2, max_batch=8, together=2))
    # Four samples: 1 + 3 s a step, 40 s; two: 20 s. Scored without parts 40 + 6 · 4 / 2 = 52 s, with them
    # two samples from 20 s to 28 s, four from 40 s on: 48 s, and half a second of parts.
    assert (alone.gain_s, alone.of_s) == pytest.approx((3.5, 52.0))


def test_samples_of_a_prompt_do_not_wait_for_the_last_ones_where_that_gains_more() -> None:
    """Of four samples of each prompt one takes a hundred steps, on one instance each, and the rest one. Whole groups
    have all to be scored at the end; split, with few left and gathered, most is behind generation."""
    groups = [(2, 2, 2, 101)]
    size = RolloutSize(samples=32, instances=2, max_batch=32, together=4)
    times = FusionTimes(step_s=1.0, more_s=0.0, token_s=0.1, parts_s=0.0, prompt_tokens=1.0)
    early = predicted(times, groups, size, seed=1)
    assert early.pays
    assert early.num_split > 0
    twice = predicted(replace(times, step_tokens=2.0), groups, size, seed=1)
    assert early.gain_s - twice.gain_s == pytest.approx(2.0), "a move of two steps takes as long as four tokens"
    alone = predicted(times, [(101,)], replace(size, together=1), seed=1)
    assert alone.num_split == 0
    again = predicted(replace(times, prompt_tokens=1e4, token_s=1e-5), groups, size, seed=1)
    assert again.num_split == 0, "prompts would be read again"


def test_without_lengths_or_with_one_instance_there_is_nothing() -> None:
    assert not predicted(TIMES, [], THREE).pays
    assert not predicted(TIMES, [()], THREE).pays
    assert not predicted(TIMES, ALIKE, RolloutSize(samples=3, instances=1, max_batch=8)).pays


groups = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=4), min_size=1, max_size=6)


@settings(max_examples=examples(25, 100))
@given(groups, st.integers(2, 4), st.integers(1, 3), st.floats(0, 0.5), st.integers(0, 9))
def test_what_holds_of_any_rollout(
    lengths: list[list[int]], instances: int, together: int, token_s: float, seed: int
) -> None:
    """The same lengths give the same answer; the gain is less than three quarters of what scoring takes, and what
    gathering saves of generation; where nothing is scored nothing pays."""
    size = RolloutSize(6 * together, instances, 8, together)
    times = FusionTimes(0.1, 0.02, token_s, 0.0, 5.0)
    early = predicted(times, lengths, size, seed=seed)
    assert early == predicted(times, lengths, size, seed=seed)
    assert early.gain_s <= early.of_s
    nothing = predicted(FusionTimes(0.1, 0.02, 0.0, 1.0, 5.0), lengths, size, seed=seed)
    assert not nothing.pays or nothing.gain_s <= nothing.of_s
