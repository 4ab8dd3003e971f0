"""Continuous batching as decisions: by hand, and over random workloads with a stand-in for the engine."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.batching import Limits, Start, StepKind, StepPlan, WaitingPrompt, compaction, grown, plan_step

LIMITS = Limits(max_running=4, max_prefill_tokens=10)


def test_prompts_are_prefilled_together_within_the_budget() -> None:
    waiting = [WaitingPrompt(7, 4, 1, False), WaitingPrompt(8, 6, 1, False), WaitingPrompt(9, 1, 1, False)]
    plan = plan_step(waiting, 0, LIMITS)
    assert plan == StepPlan(StepKind.PREFILL, (7, 8), (Start(7, 1), Start(8, 1)))


def test_a_prompt_above_the_budget_goes_alone() -> None:
    waiting = [WaitingPrompt(7, 40, 1, False), WaitingPrompt(8, 1, 1, False)]
    assert plan_step(waiting, 0, LIMITS) == StepPlan(StepKind.PREFILL, (7,), (Start(7, 1),))
    assert plan_step(waiting[::-1], 0, LIMITS) == StepPlan(StepKind.PREFILL, (8,), (Start(8, 1),))


def test_a_group_larger_than_the_batch_starts_in_parts_and_keeps_its_turn() -> None:
    waiting = [WaitingPrompt(7, 3, 6, False), WaitingPrompt(8, 3, 1, False)]
    assert plan_step(waiting, 0, LIMITS) == StepPlan(StepKind.PREFILL, (7,), (Start(7, 4),))
    waiting = [WaitingPrompt(7, 3, 2, True), WaitingPrompt(8, 3, 1, False)]
    assert plan_step(waiting, 4, LIMITS) == StepPlan(StepKind.DECODE, (), ())
    assert plan_step(waiting, 3, LIMITS) == StepPlan(StepKind.DECODE, (), (Start(7, 1),))
    # Room for more than the prefilled prompt asks: the next one is computed, and both start.
    assert plan_step(waiting, 1, LIMITS) == StepPlan(StepKind.PREFILL, (8,), (Start(7, 2), Start(8, 1)))


def test_compaction_by_hand() -> None:
    assert compaction(5, [1]) == ((4, 1),)
    assert compaction(5, [4]) == ()
    assert compaction(5, [0, 1, 4]) == ((2, 0), (3, 1))
    assert compaction(3, [0, 1, 2]) == ()


@given(num_running=st.integers(0, 30), data=st.data())
def test_compaction_leaves_the_others_without_gaps(num_running: int, data: st.DataObject) -> None:
    leaving = data.draw(st.sets(st.integers(0, num_running - 1)) if num_running else st.just(set()))
    slots = list(range(num_running))
    moves = compaction(num_running, leaving)
    for source, target in moves:
        assert slots[source] not in leaving, "a sample that leaves is copied"
        slots[target] = slots[source]
    rest = slots[: num_running - len(leaving)]
    assert sorted(rest) == sorted(set(range(num_running)) - leaving)
    assert not {source for source, _ in moves} & {target for _, target in moves}
    assert len(moves) <= len(leaving)


def test_growth_by_hand() -> None:
    assert grown(0, 5, 64) == 5
    assert grown(5, 5, 64) == 5
    assert grown(5, 6, 64) == 10
    assert grown(5, 21, 64) == 40
    assert grown(40, 41, 64) == 64
    with pytest.raises(AssertionError, match="65 needed, 64"):
        grown(40, 65, 64)


@given(
    prompts=st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(1, 9), min_size=1, max_size=7)), max_size=8),
    limits=st.builds(Limits, max_running=st.integers(1, 9), max_prefill_tokens=st.integers(1, 30)),
)
def test_every_sample_runs_once_within_the_limits(prompts: list[tuple[int, list[int]]], limits: Limits) -> None:
    """A stand-in engine that only counts: sample i of prompt u has lengths[i] tokens, one from its start."""
    pending = {uid: list(lengths) for uid, (_, lengths) in enumerate(prompts)}
    prefilled: list[int] = []
    running: list[int] = []
    started = steps = 0
    while running or any(pending.values()):
        waiting = [
            WaitingPrompt(uid, prompts[uid][0], len(rest), uid in prefilled) for uid, rest in pending.items() if rest
        ]
        plan = plan_step(waiting, len(running), limits)
        tokens = sum(prompts[uid][0] for uid in plan.prefill)
        assert tokens <= limits.max_prefill_tokens or len(plan.prefill) == 1
        assert not set(plan.prefill) & set(prefilled), "a prompt is computed twice"
        assert set(plan.prefill) <= {start.uid for start in plan.starts}, "keys and values lie unused"
        prefilled += plan.prefill
        for start in plan.starts:
            assert start.uid in prefilled
            lengths = [pending[start.uid].pop(0) for _ in range(start.num_samples)]
            running += [length - 1 for length in lengths]
            started += start.num_samples
        assert len(running) <= limits.max_running
        running = [left for left in running if left > 0]
        if plan.kind is StepKind.DECODE:
            running = [left - 1 for left in running if left > 1]
        steps += 1
        assert steps <= 1000
    assert prefilled == sorted(prefilled), "first come, first served"
    assert started == sum(len(lengths) for _, lengths in prompts)


def test_imports_no_torch() -> None:
    code = "import sys, plait.policy.batching, plait.generation.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
