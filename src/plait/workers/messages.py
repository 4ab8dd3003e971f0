"""What travels between ranks: a JSON value and arrays, never pickled; rows and samples in that form.

Shapes: N samples, R response tokens of all of them together, P prompts.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.data.records import FinishReason, Prompt, Reply, Sample
from plait.data.rows import Rows
from plait.dataflow import Column
from plait.workers.packed_experts import pack_experts, unpack_experts
from plait.workers.packed_supports import pack_supports, unpack_supports

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_REASONS = tuple(FinishReason)
RESULT = "result"
"""The kind of an answer that is the result of a call."""


@dataclass(frozen=True)
class Message:
    """
    header: JSON values (NaN and infinities too)
    arrays: of numbers, any shape
    kind:   name of the record that it holds, if the receiver cannot know
    number: of the command that it carries or answers
    step:   of the run, to which the work for a command is recorded
    """

    header: Mapping[str, Any]
    arrays: tuple[NDArray[Any], ...] = ()
    kind: str = ""
    number: int | None = None
    step: int | None = None

    @property
    def num_array_bytes(self) -> int:
        """Bytes of the arrays alone."""
        return sum(array.nbytes for array in self.arrays)

    def to_bytes(self) -> bytearray:
        """The length of the head, the head as JSON, the arrays one after another."""
        table = [(array.dtype.str, array.shape) for array in self.arrays]
        labels = {"kind": self.kind, "number": self.number, "step": self.step}
        head = json.dumps({"header": self.header, "arrays": table, **labels}).encode()
        head += b" " * (-(len(head) + _LENGTH.size) % _ALIGNMENT)
        out = bytearray(_LENGTH.pack(len(head)) + head)
        for array in self.arrays:
            data = np.ascontiguousarray(array).tobytes()
            out += data + b"\0" * (-len(data) % _ALIGNMENT)
        return out

    @classmethod
    def from_bytes(cls, data: NDArray[np.uint8]) -> Message:
        """The message of these bytes [B] uint8, of which its arrays are views."""
        (size,) = _LENGTH.unpack(data[: _LENGTH.size].tobytes())
        at = _LENGTH.size + size
        record = json.loads(bytes(data[_LENGTH.size : at]))
        arrays = []
        for text, shape in record["arrays"]:
            dtype = np.dtype(text)
            stop = at + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            arrays.append(data[at:stop].view(dtype).reshape(shape))
            at = stop + -(stop - at) % _ALIGNMENT
        return cls(record["header"], tuple(arrays), record["kind"], record["number"], record["step"])


def pack_rows(rows: Rows, columns: Sequence[Column]) -> tuple[NDArray[Any], ...]:
    """Rows as arrays: those of `pack_samples`, then these of their columns, in the shapes of `Rows.shape_of`. Texts and
    columns of the data set stay behind."""
    return (*pack_samples(rows.samples), *(rows.columns[column] for column in columns))


def unpack_rows(arrays: Sequence[NDArray[Any]], columns: Sequence[Column]) -> Rows:
    """What `pack_rows` packed, in its shapes; every text is empty."""
    samples = unpack_samples(arrays[:NUM_SAMPLE_ARRAYS])
    return Rows(samples, dict(zip(columns, arrays[NUM_SAMPLE_ARRAYS:], strict=True)))


NUM_SAMPLE_ARRAYS = 14
"""That `pack_samples` makes."""


def pack_samples(samples: Sequence[Sample]) -> tuple[NDArray[Any], ...]:
    """Samples as arrays; texts stay behind.

    Returns:
        int64, but for the log-probs, which are float64: of the prompts uids [P], lengths [P] and tokens [their sum]; of
        the samples heads [N, 7], tokens, log-probs and versions [those of all, one after another]; of replies heads
        [replies, 3] and tokens; what `pack_supports` and `pack_experts` say; (P, N).
    """
    prompts = {sample.prompt.uid: sample.prompt for sample in samples}
    # Samples of one prompt may have unequal prompt tokens where another tokenizer drew the boundary.
    shared = all(prompts[sample.prompt.uid].token_ids == sample.prompt.token_ids for sample in samples)
    listed = list(prompts.values()) if shared else [sample.prompt for sample in samples]
    places = {uid: place for place, uid in enumerate(prompts)}
    heads = [
        (
            places[sample.prompt.uid] if shared else place,
            sample.index,
            len(sample.token_ids),
            len(sample.logprobs),
            _REASONS.index(sample.finish_reason),
            sample.policy_version,
            sample.token_versions is not None,
        )
        for place, sample in enumerate(samples)
    ]
    replies = [(i, reply.at, len(reply.token_ids)) for i, sample in enumerate(samples) for reply in sample.replies]
    return (
        np.array([prompt.uid for prompt in listed], dtype=np.int64),
        np.array([len(prompt.token_ids) for prompt in listed], dtype=np.int64),
        np.array([token for prompt in listed for token in prompt.token_ids], dtype=np.int64),
        np.array(heads, dtype=np.int64).reshape(len(heads), 7),
        np.array([token for sample in samples for token in sample.token_ids], dtype=np.int64),
        np.array([logprob for sample in samples for logprob in sample.logprobs], dtype=np.float64),
        np.array([version for sample in samples for version in sample.token_versions or ()], dtype=np.int64),
        np.array(replies, dtype=np.int64).reshape(len(replies), 3),
        np.array([token for s in samples for reply in s.replies for token in reply.token_ids], dtype=np.int64),
        *pack_supports([sample.supports for sample in samples]),
        *pack_experts(samples, [head[0] for head in heads], len(listed)),
        np.array([len(listed), len(samples)], dtype=np.int64),
    )


def unpack_samples(arrays: Sequence[NDArray[Any]], texts: Sequence[str] = ()) -> tuple[Sample, ...]:
    """What `pack_samples` packed, in its shapes, with these texts; none: they are empty."""
    uids, lengths, tokens, heads, responses, logprobs, versions, reply_heads, reply_tokens, *further, _ = arrays
    own_prompts, at = [], 0
    all_tokens = tokens.tolist()
    for uid, length in zip(uids.tolist(), lengths.tolist(), strict=True):
        own_prompts.append(Prompt(uid, "", tuple(all_tokens[at : at + length])))
        at += length
    replies: dict[int, list[Reply]] = {}
    stops = np.cumsum(reply_heads[:, 2]).tolist()
    for (place, at, length), stop in zip(reply_heads.tolist(), stops, strict=True):
        replies.setdefault(place, []).append(Reply(at, tuple(reply_tokens[stop - length : stop].tolist())))
    supports = unpack_supports(further[:2], heads[:, 2].tolist())
    experts = unpack_experts(further[2:], heads[:, 0].tolist())
    samples, token, logprob, stamped = [], 0, 0, 0
    all_responses, all_logprobs, all_versions = responses.tolist(), logprobs.tolist(), versions.tolist()
    for place, (prompt, index, num_tokens, num_logprobs, reason, version, has_versions) in enumerate(heads.tolist()):
        num_versions = num_tokens if has_versions else 0
        samples.append(
            Sample(
                own_prompts[prompt],
                index,
                tuple(all_responses[token : token + num_tokens]),
                tuple(all_logprobs[logprob : logprob + num_logprobs]),
                texts[place] if texts else "",
                _REASONS[reason],
                version,
                tuple(all_versions[stamped : stamped + num_versions]) if has_versions else None,
                tuple(replies.get(place, ())),
                supports=supports[place],
                experts=experts[place],
            )
        )
        token, logprob, stamped = token + num_tokens, logprob + num_logprobs, stamped + num_versions
    return tuple(samples)
