"""Calls and kinds of actions, of predictions and of measurements alike."""

from __future__ import annotations

import pytest

from plait.schedule.busy import busiest_s, busy_by_rank, call_of, kind_of
from plait.schedule.timeline import Span, Timeline


def span(action: str, kind: str, lane: str = "compute", rank: int = 0, seconds: float = 1.0) -> Span:
    return Span(action, kind, rank, 2.0, 2.0 + seconds, lane=lane, role=action.split(".")[0])


@pytest.mark.parametrize(
    ("one", "call", "kind"),
    [
        (span("actor.generate", "DECODE"), "actor.generate", "DECODE"),
        (span("actor.generate/prefill", "PREFILL"), "actor.generate", "DECODE"),
        (span("actor.train/b0/mb3", "TRAIN"), "actor.train", "TRAIN"),
        (span("actor.train/b0/1B3", "B"), "actor.train", "TRAIN"),
        (span("actor.train/b0/1SEND_F3", "SEND_F", "send"), "actor.train", "TRAIN"),
        (span("actor.train/b0/step", "STEP"), "actor.train", "STEP"),
        (span("actor.weights", "MOVE", "link"), "actor.weights", "MOVE"),
        (span("actor.weights/3", "SEND", "link"), "actor.weights", "MOVE"),
        (span("actor.weights/4", "VIEW", "link"), "actor.weights", "MOVE"),
        (span("actor.weights", "ONLOAD", "link"), "actor.onload", "ONLOAD"),
        (span("actor.offload/2/0", "OFFLOAD", "link"), "actor.offload", "OFFLOAD"),
        (span("ref.logprobs/mb0", "SCORE"), "ref.logprobs", "SCORE"),
        (span("reward.score/sevens", "SCORE", "reward worker 1"), "reward.score", "FUNCTIONS"),
        (span("critic/returns/mean", "COMPUTE"), "critic/returns/mean", "COMPUTE"),
        (span("actor.generate/samples", "SAMPLES", "link"), "actor.generate", "SAMPLES"),
    ],
)
def test_a_part_counts_for_its_call_and_its_kind(one: Span, call: str, kind: str) -> None:
    assert (call_of(one), kind_of(one)) == (call, kind)


def test_seconds_by_hand() -> None:
    """Rank 0 decodes for 1 + 2 s, rank 1 for 4; the checkpoint of 9 s belongs to no call."""
    spans = (
        span("actor.generate/prefill", "PREFILL", seconds=1.0),
        span("actor.generate/decode", "DECODE", seconds=2.0),
        span("actor.generate/decode", "DECODE", rank=1, seconds=4.0),
        span("actor.checkpoint/0", "WRITE", "disk", seconds=9.0),
    )
    assert busy_by_rank(Timeline(spans), call_of) == {"actor.generate": {0: 3.0, 1: 4.0}}
    assert busiest_s(Timeline(spans), kind_of) == {"DECODE": 4.0}
