"""What two instances tell each other about samples that move: an offer of the source, and what the target lacks of it.

Both are messages (`workers.messages`): keys and values travel apart from them, by a planned move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace

import numpy as np
import torch

from plait.generation.transfer import SampleState
from plait.layout.caches import CacheShape, LayerCache
from plait.policy.step import Key
from plait.reallocation.memory import DTYPES
from plait.schedule.update_rule import HeldKV
from plait.speculation.acceptance import Learned
from plait.workers.messages import Message, pack_requests, unpack_requests
from plait.workers.packed_supports import pack_supports, unpack_supports


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
        requests = {state.key[0]: state.request for state in self.states}
        heads = [
            (
                *state.key,
                len(state.token_ids),
                len(state.version_starts),
                state.num_computed_tokens,
                state.epoch,
                state.is_current,
            )
            for state in self.states
        ]
        header = {
            "recompute": [list(key) for key in self.recompute],
            "policy_version": self.states[0].policy_version if self.states else 0,
            "requests": pack_requests(list(requests.values())),
            "shape": pack_shape(self.states[0].shape) if self.states else None,
            "model": self.states[0].model if self.states else "",
            "dtype": self.states[0].dtype if self.states else "",
        }
        arrays = (
            np.array(heads, dtype=np.int64).reshape(len(heads), 7),
            np.array([token for state in self.states for token in state.token_ids], dtype=np.int64),
            np.array([logprob for state in self.states for logprob in state.logprobs], dtype=np.float64),
            np.array([start for state in self.states for start in state.version_starts], dtype=np.int64).reshape(-1, 2),
            *pack_supports([state.supports for state in self.states]),
            *(self.learned or ()),
        )
        return Message(header, arrays)

    @classmethod
    def of(cls, message: Message) -> Offer:
        header, (heads, tokens, logprobs, versions, sizes, sets, *counts) = message.header, message.arrays
        learned = (counts[0], counts[1]) if counts else None
        if not len(heads):
            return cls((), learned=learned)
        requests = {request.prompt.uid: request for request in unpack_requests(header["requests"])}
        shape, nothing = unpack_shape(header["shape"]), torch.zeros(0, dtype=DTYPES[header["dtype"]])
        supports = unpack_supports((sizes, sets), heads[:, 2].tolist())
        states, token, began = [], 0, 0
        for place, head in enumerate(heads.tolist()):
            uid, index, num_tokens, num_versions, num_computed, epoch, is_current = head
            states.append(
                SampleState(
                    requests[uid],
                    index,
                    tuple(tokens[token : token + num_tokens].tolist()),
                    tuple(logprobs[token : token + num_tokens].tolist()),
                    tuple((first, version) for first, version in versions[began : began + num_versions].tolist()),
                    num_computed,
                    epoch,
                    header["policy_version"],
                    bool(is_current),
                    shape,
                    header["model"],
                    0,
                    0,
                    nothing,
                    supports[place] or (),
                )
            )
            token, began = token + num_tokens, began + num_versions
        return cls(tuple(states), tuple((uid, index) for uid, index in header["recompute"]), learned)


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
class Answer:
    lacks: tuple[Lack, ...]
    policy_version: int
    shape: CacheShape | None
    """Shape of the target's cache, where its model is in parts."""

    def to_message(self) -> Message:
        shape = None if self.shape is None else pack_shape(self.shape)
        header = {"policy_version": self.policy_version, "shape": shape}
        return Message(
            header, (np.array([astuple(lack) for lack in self.lacks], dtype=np.int64).reshape(len(self.lacks), 4),)
        )

    @classmethod
    def of(cls, message: Message) -> Answer:
        shape = message.header["shape"]
        lacks = tuple(Lack(*row) for row in message.arrays[0].tolist())
        return cls(lacks, message.header["policy_version"], None if shape is None else unpack_shape(shape))


@dataclass(frozen=True)
class Given:
    """What a source sends ahead of samples: they as they were then, and what of them travels."""

    offer: Offer
    answer: Answer

    def to_message(self) -> Message:
        offer, answer = self.offer.to_message(), self.answer.to_message()
        return Message({"offer": offer.header, "answer": answer.header}, (*offer.arrays, *answer.arrays))

    @classmethod
    def of(cls, message: Message) -> Given:
        header, arrays = message.header, message.arrays
        offer = Offer.of(Message(header["offer"], arrays[:-1]))
        return cls(offer, Answer.of(Message(header["answer"], arrays[-1:])))


def pack_shape(shape: CacheShape) -> dict[str, object]:
    """As a JSON value."""
    return asdict(shape)


def unpack_shape(value: dict[str, object]) -> CacheShape:
    shape = CacheShape(**value)  # type: ignore[arg-type]
    return replace(shape, layers=tuple(LayerCache(**layer) for layer in shape.layers))  # type: ignore[arg-type]


def gaps(start: int, stop: int, arrived: Sequence[SampleState]) -> list[tuple[int, int]]:
    """The ranges within start … stop − 1 that none of these brings."""
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
