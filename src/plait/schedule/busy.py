"""Busy seconds of a timeline, by call and by kind of action, in the grain that predictions and measurements share.

A prediction has one action for a call, a run many: `actor.generate` is all of `actor.generate/prefill` and
`actor.generate/decode`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from plait.dataflow.call_name import CallName
from plait.layout.move_plan import MoveKind
from plait.schedule.action import Kind
from plait.schedule.timeline import Span, Timeline
from plait.schedule.work import COMPUTE, DISK

OFFLOADS = ("OFFLOAD", "ONLOAD")
BESIDE = " beside "
"""In the lane of calls that a worker of functions has under way while it has others."""
_PIPELINE = (
    Kind.FORWARD,
    Kind.BACKWARD,
    Kind.SEND_FORWARD,
    Kind.RECV_FORWARD,
    Kind.SEND_BACKWARD,
    Kind.RECV_BACKWARD,
)
_KINDS = {
    Kind.PREFILL.value: "DECODE",
    **{kind.value: "TRAIN" for kind in _PIPELINE},
    Kind.REDUCE.value: "STEP",
    **{kind.value: "MOVE" for kind in MoveKind},
}
"""Kind of a part → that of the whole, where it is another."""


def call_of(span: Span) -> str:
    """The call of the flow, or the move, that an action is a part of, as metrics name it: `actor.train` of
    `actor.train/b0/mb3`. What leaves a device and comes back stands under its role, `actor.offload`."""
    if span.kind == "COMPUTE":  # one action, whose name may have a slash of its own (`critic/returns/mean`)
        return span.action
    if span.kind in OFFLOADS and "/" not in span.action:
        return f"{CallName.of(span.action).role}.{span.kind.lower()}"
    return span.whole


def kind_of(span: Span) -> str:
    """DECODE (with its prompts), SCORE, TRAIN (forward and backward, stages and what they send each other), STEP (an
    optimizer step with its sums), MOVE, OFFLOAD, ONLOAD; FUNCTIONS (of rewards, in processes of their own). What has no
    other name keeps its own."""
    if span.kind == Kind.SCORE and span.lane != COMPUTE:
        return "FUNCTIONS"
    return _KINDS.get(span.kind, span.kind)


def busy_by_rank(timeline: Timeline, name_of: Callable[[Span], str]) -> dict[str, dict[int, float]]:
    """Name → rank → its busy seconds, in the order in which names first occur. Checkpoints belong to no call: what is
    written to a disk is left out. So is what a worker has under way beside another call: both wait at a time."""
    busy: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in timeline.spans:
        if span.lane != DISK and BESIDE not in span.lane:
            busy[name_of(span)][span.rank] += span.duration_s
    return {name: dict(ranks) for name, ranks in busy.items()}


def busiest_s(timeline: Timeline, name_of: Callable[[Span], str]) -> dict[str, float]:
    """Name → busy seconds of the rank that is busiest with it."""
    return {name: max(ranks.values()) for name, ranks in busy_by_rank(timeline, name_of).items()}
