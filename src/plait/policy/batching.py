"""Continuous batching: who is prefilled, who starts, who moves to which slot. Pure functions without torch.

The engine executes these decisions; a simulator given the same numbers takes the same ones. They depend on the requests
and the limits alone (no clock, no free memory), so a resumed run repeats them.

Words: a *prompt* is prefilled once and then starts its samples, all at once or as places become free. Running samples
hold the slots 0 … num_running − 1, without gaps, so that the engine's tensors of the batch are plain views.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum


class StepKind(StrEnum):
    PREFILL = "prefill"
    """The forward of whole prompts; the samples that it starts get their first token."""
    DECODE = "decode"
    """One more token for every running sample."""


@dataclass(frozen=True)
class Limits:
    max_running: int
    """Samples in the batch at most."""
    max_prefill_tokens: int
    """Tokens of one prefill at most; a longer prompt goes alone."""


@dataclass(frozen=True)
class WaitingPrompt:
    """A prompt with samples that have not started."""

    uid: int
    num_tokens: int
    num_samples: int
    """Not started yet; at least 1."""
    prefilled: bool
    """Its keys and values are held."""


@dataclass(frozen=True)
class Start:
    """Begin the next `num_samples` samples of a prompt."""

    uid: int
    num_samples: int


@dataclass(frozen=True)
class StepPlan:
    """What one step does: prefill, then start, and if nothing was prefilled decode."""

    kind: StepKind
    prefill: tuple[int, ...]
    """Uids of the prompts computed together; empty for DECODE."""
    starts: tuple[Start, ...]
    """In order; of prompts that are prefilled, now or before."""


def plan_step(waiting: Iterable[WaitingPrompt], num_running: int, limits: Limits) -> StepPlan:
    """Decide one step: first come, first served; prefill as soon as a place is free.

    Prompts are prefilled only while a sample of each can start at once, so no keys and values lie unused; a prompt that
    is prefilled and has more samples than places goes on as places become free.

    Args:
        waiting: in order of arrival; read no further than there are places.
        num_running: samples in the batch.
    """
    assert 0 <= num_running <= limits.max_running, f"{num_running} run, {limits.max_running} may"
    places = limits.max_running - num_running
    prefill: list[int] = []
    starts: list[Start] = []
    tokens = 0
    for prompt in waiting:
        if places == 0:
            break
        if not prompt.prefilled:
            if prefill and tokens + prompt.num_tokens > limits.max_prefill_tokens:
                break
            tokens += prompt.num_tokens
            prefill.append(prompt.uid)
        count = min(places, prompt.num_samples)
        starts.append(Start(prompt.uid, count))
        places -= count
    return StepPlan(StepKind.PREFILL if prefill else StepKind.DECODE, tuple(prefill), tuple(starts))


def compaction(num_running: int, leaving: Collection[int]) -> tuple[tuple[int, int], ...]:
    """Moves (source slot, target slot) that close the gaps of the leaving slots, as few as can be.

    Afterwards the others hold the slots 0 … num_running − len(leaving) − 1. Sources and targets are disjoint.
    """
    remaining = num_running - len(leaving)
    gaps = sorted(slot for slot in leaving if slot < remaining)
    movers = [slot for slot in range(remaining, num_running) if slot not in leaving]
    return tuple(zip(movers, gaps, strict=True))


def grown(current: int, needed: int, limit: int) -> int:
    """Capacity that holds `needed`: just that at first, then the current one doubled, `limit` at most."""
    assert needed <= limit, f"{needed} needed, {limit} is the limit"
    if needed <= current:
        return current
    capacity = max(current, 1)
    while capacity < needed:
        capacity *= 2
    return min(capacity if current else needed, limit)
