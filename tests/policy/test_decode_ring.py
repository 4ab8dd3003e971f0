"""The closed forms of a decode ring, held against a simulated schedule, and how many groups there are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import ConfigError
from plait.policy.decode_ring import COSTS, GroupRule, Ring, StageCost, StageUse, busy_shares, num_groups
from plait.schedule.action import Action, Kind, action_id
from plait.schedule.schedule import Schedule
from plait.schedule.validate import validate
from plait.simulator.static import simulate


def ring_schedule(num_stages: int, num_groups: int, num_rounds: int) -> Schedule:
    """Rank s runs stage s of groups 0 … G−1, round after round; stage 0 of a round waits for the last stage of the one
    before."""
    rows: list[list[Action]] = [[] for _ in range(num_stages)]
    for round in range(num_rounds):
        for group in range(num_groups):
            for stage in range(num_stages):
                before = (stage - 1, round) if stage else (num_stages - 1, round - 1)
                waits = (action_id(Kind.DECODE, "", 0, before[0], group, before[1]),) if before[1] >= 0 else ()
                rows[stage].append(Action(Kind.DECODE, "", 0, stage, group, round, rank=stage, waits=waits))
    return Schedule(tuple(tuple(row) for row in rows), "decode ring")


@pytest.mark.parametrize(
    ("stages", "groups", "hop", "round_s", "busy"),
    [
        (4, 1, 0.0, 8.0, 0.25),  # naive: one stage in P is busy
        (4, 4, 0.0, 8.0, 1.0),
        (4, 4, 0.5, 10.0, 0.8),
        (4, 5, 0.5, 10.0, 1.0),  # one slack slot hides a hop of t / P
        (4, 8, 0.5, 16.0, 1.0),
        (1, 1, 0.0, 2.0, 1.0),
    ],
)
def test_closed_forms(stages, groups, hop, round_s, busy):
    ring = Ring(stages, groups, 2.0, hop)
    assert ring.round_s == round_s
    assert groups * ring.stage_s / ring.round_s == busy


@settings(max_examples=40)
@given(
    st.integers(1, 5), st.integers(1, 8), st.sampled_from([1.0, 2.0, 3.0]), st.sampled_from([0.0, 0.25, 0.5, 1.0, 4.0])
)
def test_the_simulator_runs_at_the_rate_of_the_closed_form(stages, groups, stage_s, hop_s):
    ring = Ring(stages, groups, stage_s, hop_s if stages > 1 else 0.0)
    rounds = 12
    schedule = ring_schedule(stages, groups, rounds)
    validate(schedule)
    timeline = simulate(schedule, lambda action: stage_s, latency_s=lambda a, b: hop_s)
    ends = {(s.action): s.end_s for s in timeline.spans}
    last = f"{stages - 1}DECODE{groups - 1}"
    assert ends[f"{last}.{rounds - 1}"] - ends[f"{last}.4"] == pytest.approx((rounds - 5) * ring.round_s)


@pytest.mark.parametrize(
    ("cost", "stages", "samples", "groups"),
    [
        (StageCost(0.0, 1.0), 4, 64, 4),  # products alone: P where hops cost nothing
        (StageCost(0.0, 1.0, 0.1), 4, 60, 5),  # P + 1 where one costs
        (StageCost(0.0, 1.0, 0.1), 4, 3, 3),  # never more than samples
        (StageCost(6.0, 1.0, 0.5), 2, 64, 2),  # a group more costs 6, the hops of a round 1
        (StageCost(1.0, 1.0, 0.6), 2, 60, 3),  # 1 against 1.2
        (StageCost(1.0, 0.0), 4, 64, 1),  # reading weights alone: nothing is gained
        (StageCost(6.0, 1.0, 0.5), 2, 1, 1),
        (StageCost(6.0, 1.0, 0.5), 1, 64, 1),
        (StageCost(6.0, 1.0, 0.5), 2, 0, 1),
    ],
)
def test_how_many_groups(cost, stages, samples, groups):
    assert num_groups(cost, stages, samples) == groups


@given(st.sampled_from(sorted(COSTS)), st.integers(2, 8), st.integers(1, 300))
def test_no_other_number_of_groups_has_a_shorter_round(device, stages, samples):
    cost = COSTS[device]
    found = num_groups(cost, stages, samples)
    rounds = [cost.ring(stages, count, samples).round_s for count in range(1, min(samples, 2 * stages) + 1)]
    assert rounds[found - 1] <= min(rounds) * (1 + 1e-9)


def test_a_batch_cut_into_groups_gains_what_products_allow():
    """(t(B) + c) / (t(B / P) + c): P where products take all the time, 1 where reading weights does."""
    for cost, gain in ((StageCost(0.0, 1.0), 4.0), (StageCost(1.0, 0.0), 1.0), (StageCost(16.0, 1.0), 80 / 32)):
        whole, cut = cost.ring(4, 1, 64), cost.ring(4, 4, 64)
        assert whole.round_s / cut.round_s == pytest.approx(gain)


def test_busy_shares_stand_beside_the_closed_form():
    uses = [StageUse(0, 2, 10.0, 2.0, 5, 10), StageUse(0, 2, 10.0, 4.0, 5, 10), StageUse(1, 2, 8.0, 1.0, 5, 10)]
    assert busy_shares(uses) == {"stage_0": pytest.approx(0.7), "stage_1": pytest.approx(0.875), "closed_form": 1.0}
    naive = StageUse(0, 4)
    naive.add(2.0, 1.5, 1)
    assert busy_shares([naive]) == {"stage_0": 0.25, "closed_form": 0.25}
    assert busy_shares([StageUse(0, 1, 10.0, 0.0, 5, 5), StageUse(0, 2)]) == {}


def test_a_ring_without_stages_is_refused():
    with pytest.raises(ConfigError, match="decode ring"):
        Ring(0, 1, 1.0)


@pytest.mark.parametrize(
    ("stages", "stated", "most", "of"),
    [
        (1, None, 1, [1, 1, 1]),
        (1, 3, 1, [1, 1, 1]),
        (2, 3, 3, [1, 1, 3]),
        (4, None, 5, [1, 1, 4]),
    ],
)
def test_a_rule_says_how_many_groups_there_are(stages: int, stated: int | None, most: int, of: list[int]) -> None:
    """Of no sample, one, and four; hops cost nothing, so that as many groups as stages fill them."""
    rule = GroupRule(stages, StageCost(0.0, 1.0), stated)
    assert rule.most == most
    assert [rule.groups(samples) for samples in (0, 1, 4)] == of
