"""What two instances tell each other about samples that move: an offer of the source, and what the target lacks of it.

Both are messages (`workers.messages`): keys and values travel apart from them, by a planned move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from plait.generation.request import Request
from plait.generation.transfer import SampleState
from plait.layout.caches import CacheShape
from plait.policy.step import Key
from plait.reallocation.memory import DTYPES
from plait.schedule.update_rule import HeldKV
from plait.speculation.acceptance import Learned
from plait.workers.messages import Message
from plait.workers.packed_supports import pack_supports, unpack_supports
from plait.workers.wire_forms import Record


@dataclass(frozen=True)
class Offer:
    """Samples between two tokens, without keys and values."""

    states: tuple[SampleState, ...]
    recompute: tuple[Key, ...] = ()
    """Those whose keys and values do not travel."""
    learned: Learned | None = None
    """What the source knows of how often draft tokens are accepted; None: nothing."""

    def sharing(self, policy_version: int) -> dict[int, SampleState]:
        """Prompt uid → a sample whose prompt's keys and values serve all that `shares_prompt` in a target of this
        version."""
        sharing: dict[int, SampleState] = {}
        for state in self.states:
            if state.key not in self.recompute and shares_prompt(state, policy_version):
                sharing.setdefault(state.key[0], state)
        return sharing

    def to_message(self) -> Message:
        states = self.states
        head = lambda s: (s.num_computed_tokens, s.epoch, s.policy_version, s.is_current)
        heads = [(*s.key, len(s.token_ids), len(s.version_starts), *head(s)) for s in states]
        return _Offered(
            tuple({state.key[0]: state.request for state in states}.values()),
            self.recompute,
            (states[0].shape, states[0].model, states[0].dtype) if states else None,
            np.array(heads, dtype=np.int64).reshape(len(heads), 8),
            np.array([token for state in states for token in state.token_ids], dtype=np.int64),
            np.array([logprob for state in states for logprob in state.logprobs], dtype=np.float64),
            np.array([start for state in states for start in state.version_starts], dtype=np.int64).reshape(-1, 2),
            pack_supports([state.supports for state in states]),
            self.learned,
        ).to_message()

    @classmethod
    def of(cls, message: Message) -> Offer:
        told = _Offered.of(message)
        if told.model is None:
            return cls((), learned=told.learned)
        shape, model, dtype = told.model
        requests = {request.prompt.uid: request for request in told.requests}
        nothing = torch.zeros(0, dtype=DTYPES[dtype])
        heads, tokens, logprobs = told.heads.tolist(), told.tokens.tolist(), told.logprobs.tolist()
        starts, supports = told.version_starts.tolist(), unpack_supports(told.supports, told.heads[:, 2].tolist())
        states, at, began = [], 0, 0
        for head, sets in zip(heads, supports, strict=True):
            uid, index, num_tokens, num_starts, computed, epoch, version, is_current = head
            states.append(
                SampleState(
                    requests[uid],
                    index,
                    tuple(tokens[at : at + num_tokens]),
                    tuple(logprobs[at : at + num_tokens]),
                    tuple(map(tuple, starts[began : began + num_starts])),
                    computed,
                    epoch,
                    version,
                    bool(is_current),
                    shape,
                    model,
                    0,
                    0,
                    nothing,
                    sets or (),
                )
            )
            at, began = at + num_tokens, began + num_starts
        return cls(tuple(states), told.recompute, told.learned)


@dataclass(frozen=True)
class _Offered(Record):
    """An offer as it travels: each request once, and what is long one after another.

    model: its cache, name and dtype; None: no sample is offered
    heads: [samples, 8]: uid, index, tokens, stretches of one version, computed tokens, epoch, version, whether current
    """

    requests: tuple[Request, ...]
    recompute: tuple[Key, ...]
    model: tuple[CacheShape, str, str] | None
    heads: NDArray[np.int64]
    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    version_starts: NDArray[np.int64]
    supports: tuple[NDArray[np.int32], NDArray[np.uint8]]
    learned: Learned | None


def shares_prompt(state: SampleState, policy_version: int) -> bool:
    """Whether in a target of this version a sample has its prompt's keys and values in common with the others of it."""
    has_prompt = state.num_computed_tokens >= len(state.request.prompt.token_ids)
    return has_prompt and state.is_current and state.policy_version == policy_version


@dataclass(frozen=True)
class Lack:
    """Tokens start … stop − 1 of a sample, or of a prompt (index −1), that a target has not."""

    uid: int
    index: int
    start: int
    stop: int

    @property
    def key(self) -> Key:
        return self.uid, self.index

    @property
    def length(self) -> int:
        return self.stop - self.start


def lacks_of_sample(state: SampleState, policy_version: int, arrived: Sequence[SampleState], kv: HeldKV) -> list[Lack]:
    """What a target of this version lacks of a sample's own tokens.

    Args:
        arrived: what it has of them.
        kv: as of `SampleMover`.
    """
    if state.policy_version != policy_version and kv == "recompute":
        return []
    first = len(state.request.prompt.token_ids) if shares_prompt(state, policy_version) else 0
    return [Lack(*state.key, *gap) for gap in gaps(first, state.num_computed_tokens, arrived)]


@dataclass(frozen=True)
class Answer(Record):
    lacks: tuple[Lack, ...]
    policy_version: int
    shape: CacheShape | None
    """Shape of the target's cache, where its model is in parts."""


@dataclass(frozen=True)
class Given(Record):
    """What a source sends before the samples: their states at the time of the offer, and which parts of them travel."""

    offer: Offer
    answer: Answer


def gaps(start: int, stop: int, arrived: Sequence[SampleState]) -> list[tuple[int, int]]:
    """The ranges (start, stop) within `start` … `stop` that none of the arrived samples covers."""
    ranges, at = [], start
    for state in sorted(arrived, key=lambda state: state.start):
        if state.start >= stop:
            break
        if state.start > at:
            ranges.append((at, state.start))
        at = max(at, state.stop)
    if at < stop:
        ranges.append((at, stop))
    return ranges
