"""How old the samples of a step are, and how much of it each side of a run waited for the other."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from plait.dataflow import CallKind, Dataflow, Node
from plait.runtime.steps.drawn import DrawnBatch
from plait.runtime.steps.step import StepState
from plait.schedule.plan import Plan
from plait.schedule.timeline import Timeline, covered_s

SIDES = {"rollouter": ("prefill", "decode"), "trainer": ("train",)}
"""Name of a side → what its ranks do in a plan."""


def off_policy_metrics(
    flow: Dataflow, state: StepState, waiting: Collection[DrawnBatch], most: int
) -> dict[str, float]:
    """Metrics of a step that has ended, in versions and in samples. How old samples are is said of rollouts of roles
    that are trained, as what a frozen one draws is always of its first version; and of those that train: without any,
    `mean`, `max` and `mixed` are left out. No rollout of a trained role is too old, whether it trains or not.

    Args:
        waiting: the batches that are drawn, and that later steps train on.
        most: versions that samples may be behind.
    """
    rollouts = [node for node in flow.of_kind(CallKind.GENERATE) if node.role in flow.trained_roles]
    oldest = max((lag for node in rollouts for lag in _lags(state, node)), default=0)
    assert oldest <= most, f"samples of step {state.step + 1} are {oldest} versions old, and {most} may be"
    asked = sum(rows.num_asked for rows in state.growing.values())
    drawn = sum(len(state.generated[node]) for node in state.growing)
    assert asked == drawn, f"step {state.step + 1} asked for {asked} samples and has drawn {drawn}"
    later = [sample.policy_version for batch in waiting for drawn in batch.samples.values() for sample in drawn]
    in_flight = sum(version == state.step for version in later)
    metrics: dict[str, float] = {
        "off_policy/in_flight": in_flight,
        "off_policy/in_queue": len(later) - in_flight,
        "off_policy/dropped": asked - drawn,
    }
    used = [node for node in rollouts if node in flow.trained_on]
    if lags := [lag for node in used for lag in _lags(state, node)]:
        mixed = [sample.token_versions is not None for node in used for sample in state.generated[node.id].samples]
        metrics |= {"off_policy/mean": float(np.mean(lags)), "off_policy/max": float(max(lags))}
        metrics["off_policy/mixed"] = float(np.mean(mixed))
    return metrics


def _lags(state: StepState, rollout: Node) -> list[int]:
    """Versions that each of a rollout's samples is behind."""
    return [state.step - sample.oldest_version for sample in state.generated[rollout.id].samples]


def idle_ratios(timeline: Timeline, plan: Plan, seconds: float) -> dict[str, float]:
    """Share of a step's seconds in which the ranks that generate, and those that train, computed nothing, by the names
    of SIDES: the mean over their ranks."""
    ratios: dict[str, float] = {}
    for side, modes in SIDES.items():
        ranks = {rank for placement in plan.placements if placement.mode in modes for rank in placement.ranks}
        ratios[side] = float(np.mean([idle_ratio(timeline, rank, seconds) for rank in sorted(ranks)]))
    return ratios


def idle_ratio(timeline: Timeline, rank: int, seconds: float) -> float:
    """Share of some seconds in which a rank computed nothing."""
    busy = [(span.start_s, span.end_s) for span in timeline.spans if span.rank == rank and span.lane == "compute"]
    return max(0.0, 1 - covered_s(busy) / seconds)
