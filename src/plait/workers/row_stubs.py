"""Rows for one data-parallel rank: whole those of its share, and of all others the stub alone.

A rank must know of every row how long it is and which of its tokens are trained: from that all ranks draw the same
mini-batches, divide them alike, and have the same denominators. What it says and its columns it needs of its share.

The stubs of all rows go to every rank, so they are what the leader sends more of with each rank: they are packed once,
small numbers in a few bytes (`tests/workers/test_many_workers.py` has what 64 ranks cost).

Shapes: N rows, A of them outside the share.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.data.records import FinishReason, Prompt, Reply, Sample
from plait.data.rows import Rows
from plait.dataflow import Column, Level
from plait.layout.mesh import Layout
from plait.workers.messages import Message, pack_rows, unpack_rows
from plait.workers.ranks import LEADER

Arrays = tuple[NDArray[Any], ...]

ABSENT = -1
"""Stands for every token that a rank was not sent: no embedding has it. For numbers stands NaN."""

_REASONS = tuple(FinishReason)


def pack_shares(
    rows: Rows, columns: Sequence[Column], shares: Sequence[Sequence[int]], mask: Column | None = None
) -> list[Arrays]:
    """For each share the rows as arrays, with these of their columns.

    Args:
        shares: positions of the rows that go whole, ascending.
        mask: one of `columns`, of 1.0 and 0.0: goes whole, a bit per token.
    """
    kept_R = None if mask is None else rows.columns[mask] != 0
    stubs = np.zeros(0, dtype=np.uint8)
    if any(len(share) < len(rows) for share in shares):
        stubs = _packed(np.array([_stub_of(rows, i, kept_R) for i in range(len(rows))], dtype=np.int64), kept_R)
    of_call = Rows(rows.samples, {column: rows.columns[column] for column in columns})
    places = [np.array(share, dtype=np.int64) for share in shares]
    common = np.array([rows.root_tokens]), stubs
    return [
        (own, *common, *pack_rows(of_call.select(share), columns)) for own, share in zip(places, shares, strict=True)
    ]


def unpack_share(arrays: Sequence[NDArray[Any]], columns: Sequence[Column] = (), mask: Column | None = None) -> Rows:
    """What `pack_shares` packed for one, in its shapes: all rows in their order.

    Outside the share tokens are ABSENT, but for the last trained one of each response; columns are NaN, but for the
    mask.
    """
    share, root, packed, *rest = arrays
    shared_rows = unpack_rows(rest, columns)
    present = tuple(share.tolist())
    inside = set(present)
    stubs, bits = _unpacked(packed) if len(packed) else (np.zeros((len(share), _NUMBERS), np.int64), None)
    absent = [i for i in range(len(stubs)) if i not in inside]
    whole = dict(zip(present, shared_rows.samples, strict=True))
    rows = Rows(tuple(whole[i] if i in whole else _hollow(*stub) for i, stub in enumerate(stubs.tolist())))
    places = {Level.TOKEN: rows.token_places(present), Level.SAMPLE: share}
    filled = {}
    for column in columns:
        filled[column] = np.full(rows.shape_of(column.level, column.width), np.nan)
        filled[column][places[column.level]] = shared_rows.columns[column]
    away = rows.token_places(absent)
    kept = np.ones(len(away), np.bool_)
    if mask is not None and bits is not None:
        kept = np.unpackbits(bits, count=rows.num_tokens).astype(np.bool_)[away]
        filled[mask][away] = kept
    return Rows(_with_last_tokens(rows, absent, kept, stubs[absent, _NUMBERS - 1]), filled, int(root[0]))


def by_rank(
    layout: Layout, kind: str, header: Mapping[str, Any], arrays_of: Callable[[int], Sequence[Arrays]]
) -> dict[int, Message]:
    """A message for each rank of the layout but the leader: ranks of one dp index get the same.

    Args:
        arrays_of: number of dp ranks → the arrays of each; asked only where somebody gets them.
    """
    ranks = [rank for rank in layout.mesh.ranks if rank != LEADER]
    shares = arrays_of(layout.parallelism.dp) if ranks else ()
    return {rank: Message(header, shares[layout.coordinates(rank).dp], kind) for rank in ranks}


_NUMBERS = 7
"""What a stub says."""
_COUNT = struct.Struct("<Q")


def _packed(stubs: NDArray[np.int64], kept_R: NDArray[np.bool_] | None) -> NDArray[np.uint8]:
    """[N, 7] and a bit per token, compressed: byte for byte, so that the high ones, which are equal, take nothing."""
    planes = np.ascontiguousarray(stubs.T).view(np.uint8).reshape(_NUMBERS, len(stubs), 8).transpose(0, 2, 1)
    bits = b"" if kept_R is None else np.packbits(kept_R).tobytes()
    return np.frombuffer(zlib.compress(_COUNT.pack(len(stubs)) + planes.tobytes() + bits), np.uint8)


def _unpacked(packed: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.uint8] | None]:
    """The stubs [N, 7], and the bits; None: all tokens are trained."""
    data = np.frombuffer(zlib.decompress(packed.tobytes()), np.uint8)
    (count,) = _COUNT.unpack(data[: _COUNT.size].tobytes())
    end = _COUNT.size + count * _NUMBERS * 8
    planes = data[_COUNT.size : end].reshape(_NUMBERS, 8, count).transpose(0, 2, 1)
    bits = data[end:]
    return np.ascontiguousarray(planes).view(np.int64).reshape(_NUMBERS, count).T, bits if len(bits) else None


def _stub_of(rows: Rows, position: int, kept_R: NDArray[np.bool_] | None) -> tuple[int, ...]:
    sample = rows.samples[position]
    tokens = sample.token_ids
    trained = range(len(tokens))
    if kept_R is not None:
        trained = np.flatnonzero(kept_R[rows.offsets[position] : rows.offsets[position + 1]])
    last = tokens[trained[-1]] if len(trained) else ABSENT
    prompt = sample.prompt
    return (
        prompt.uid,
        sample.index,
        len(prompt.token_ids),
        len(tokens),
        _REASONS.index(sample.finish_reason),
        sample.num_tokens - len(tokens),
        last,
    )


def _hollow(uid: int, index: int, prompt_tokens: int, tokens: int, reason: int, given: int, _: int) -> Sample:
    prompt = Prompt(uid, "", (ABSENT,) * prompt_tokens)
    replies = (Reply(tokens, (ABSENT,) * given),) if given else ()
    return Sample(prompt, index, (ABSENT,) * tokens, (), "", _REASONS[reason], replies=replies)


def _with_last_tokens(
    rows: Rows, absent: Sequence[int], kept: NDArray[np.bool_], lasts: NDArray[np.int64]
) -> tuple[Sample, ...]:
    """Samples with the last trained token of those outside the share in its place.

    Args:
        kept: of each of their tokens, whether it is trained.
        lasts: [A] the tokens, ABSENT where none is trained.
    """
    samples, at = list(rows.samples), 0
    for i, last in zip(absent, lasts.tolist(), strict=True):
        sample = samples[i]
        trained = np.flatnonzero(kept[at : at + len(sample.token_ids)])
        at += len(sample.token_ids)
        if len(trained):
            tokens = list(sample.token_ids)
            tokens[trained[-1]] = last
            samples[i] = replace(sample, token_ids=tuple(tokens))
    return tuple(samples)
