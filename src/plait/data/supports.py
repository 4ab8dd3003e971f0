"""The tokens that a draw could have drawn: what top-k, top-p and min-p have left of the vocabulary at one place.

A trainer that rounds otherwise than the engine would find another set where a logit lies at the edge, so the engine's
own travels with each token, as bytes. None stand for the whole vocabulary; else one byte says what follows: ids (the
gaps between them, seven bits in a byte), or a bit for each token of the vocabulary, whichever is shorter. So no set
takes more than V / 8 + 1 bytes, and one of few tokens takes about two for each.

Shapes: B draws, V vocabulary, W bytes of a row of bits, R response tokens, n tokens of all their sets, C rows of a
chunk of logits, G bytes of a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WHOLE = b""
"""The set of all tokens."""
_IDS, _BITS = b"\0", b"\1"
_GROUP_BITS, _GROUPS = 7, 4
"""A gap is at most 2**28 − 1."""


def bits_of(kept_BV: Tensor) -> Tensor:
    """A bit for each token, the first one the lowest of its byte.

    Args:
        kept_BV: bool.

    Returns:
        [B, W] uint8, on the same device.
    """
    if kept_BV.device.type == "cpu":
        return torch.from_numpy(np.packbits(kept_BV.numpy(), axis=1, bitorder="little"))
    return bits_by_sums(kept_BV)


def bits_by_sums(kept_BV: Tensor) -> Tensor:
    """`bits_of` by torch's operators, for devices: bool to [B, W] uint8."""
    lacking = -kept_BV.shape[1] % 8
    padded_BW8 = torch.nn.functional.pad(kept_BV, (0, lacking)).view(len(kept_BV), -1, 8)
    places_8 = torch.arange(8, device=kept_BV.device)
    return (padded_BW8.to(torch.uint8) << places_8.to(torch.uint8)).sum(-1, dtype=torch.uint8)


def num_bit_bytes(vocab_size: int) -> int:
    """W."""
    return -(-vocab_size // 8)


def encoded(bits_BW: NDArray[np.uint8], vocab_size: int) -> list[bytes]:
    """The bytes of each set; see the top of the file.

    Args:
        bits_BW: of `bits_of`.
    """
    rows, columns = np.nonzero(bits_BW)
    places, bits = np.nonzero(np.unpackbits(bits_BW[rows, columns][:, None], axis=1, bitorder="little"))
    rows_n, ids_n = rows[places], columns[places] * 8 + bits
    counts_B = np.bincount(rows_n, minlength=len(bits_BW))
    before_n = np.concatenate([np.full(1, -1), ids_n[:-1]])
    starts_B = np.cumsum(counts_B) - counts_B
    before_n[starts_B[counts_B > 0]] = -1
    groups_nG, used_nG = _groups(ids_n - before_n - 1)
    flat, ends_n = groups_nG[used_nG].tobytes(), np.cumsum(used_nG.sum(-1))
    stops_B = np.concatenate([np.zeros(1, np.int64), ends_n])[np.cumsum(counts_B)].tolist()
    sets, start = [], 0
    for row, (count, stop) in enumerate(zip(counts_B.tolist(), stops_B, strict=True)):
        ids, start = flat[start:stop], stop
        if count == vocab_size:
            sets.append(WHOLE)
        else:
            sets.append(_IDS + ids if len(ids) <= bits_BW.shape[1] else _BITS + bits_BW[row].tobytes())
    return sets


def _groups(gaps_n: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Seven bits in a byte, the lowest first, whose highest says that more follow [n, _GROUPS]; and which are used."""
    shifts_G = np.arange(_GROUPS) * _GROUP_BITS
    used_nG = (gaps_n[:, None] >> shifts_G) > 0
    used_nG[:, 0] = True
    groups_nG = (gaps_n[:, None] >> shifts_G) & 0x7F
    groups_nG[:, :-1] |= used_nG[:, 1:].astype(np.int64) << _GROUP_BITS
    return groups_nG.astype(np.uint8), used_nG


class Drawn(Protocol):
    """What a sample says of its tokens; see `data.records.Sample`."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def supports(self) -> Sequence[bytes] | None: ...


@dataclass(frozen=True, eq=False)
class Supports:
    """The sets of the response tokens of a packed batch, in their order, on the host."""

    sets: tuple[bytes, ...]
    """[R], each as `encoded`."""

    @classmethod
    def of(cls, samples: Sequence[Drawn]) -> Supports | None:
        """Those of samples, one after another; None: all their tokens were drawn from the whole vocabulary."""
        if all(sample.supports is None for sample in samples):
            return None
        return cls(tuple(kept for s in samples for kept in s.supports or (WHOLE,) * len(s.token_ids)))

    @cached_property
    def counts_R(self) -> NDArray[np.int64]:
        """Tokens of each set; −1: the whole vocabulary."""
        return self._decoded[0]

    @cached_property
    def ids_n(self) -> NDArray[np.int64]:
        """[n]: the tokens of one set after another, ascending; none of one that is the whole vocabulary."""
        return self._decoded[1]

    @cached_property
    def starts_R1(self) -> NDArray[np.int64]:
        """[R + 1]: where in `ids_n` each set begins, and the end."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.maximum(self.counts_R, 0))])

    @property
    def largest(self) -> int:
        """The largest token id of a set; −1 where none has ids."""
        return int(self.ids_n.max(initial=-1))

    def within(self, at: slice, first: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where to look in a chunk of rows of logits [C, `stop` − `first`].

        Args:
            at: the rows of the chunk among R.
            first, stop: the token ids whose logits it has.

        Returns:
            The rows of the chunk whose set is not the whole vocabulary [at most C], and the places of what is in the
            sets among all its logits, row after row [at most n].
        """
        counts_C = self.counts_R[at]
        rows_n = np.repeat(np.arange(len(counts_C)), np.maximum(counts_C, 0))
        ids_n = self.ids_n[self.starts_R1[at.start] : self.starts_R1[at.stop]]
        here_n = (ids_n >= first) & (ids_n < stop)
        return np.flatnonzero(counts_C >= 0), (rows_n * (stop - first) + ids_n - first)[here_n]

    @cached_property
    def _decoded(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        listed = [place for place, kept in enumerate(self.sets) if kept[:1] == _IDS]
        counts_R = np.full(len(self.sets), -1, dtype=np.int64)
        counts_R[listed], ids_n = _listed([self.sets[place][1:] for place in listed])
        of_bits = {
            place: np.flatnonzero(np.unpackbits(np.frombuffer(kept[1:], np.uint8), bitorder="little"))
            for place, kept in enumerate(self.sets)
            if kept[:1] == _BITS
        }
        if not of_bits:
            return counts_R, ids_n
        *lists, _ = np.split(ids_n, np.cumsum(counts_R[listed]))
        parts = dict(zip(listed, lists, strict=True)) | of_bits
        counts_R[list(of_bits)] = [len(ids) for ids in of_bits.values()]
        return counts_R, np.concatenate([parts[place] for place in sorted(parts)])


def _listed(sets: Sequence[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many tokens each of these lists has, and the tokens of one after another."""
    data = np.frombuffer(b"".join(sets), np.uint8).astype(np.int64)
    ends = np.flatnonzero(data < 0x80)
    sizes = np.diff(ends, prepend=-1)
    gaps_n = np.zeros(len(ends), np.int64)
    for group in range(_GROUPS):
        has = sizes > group
        gaps_n[has] |= (data[(ends - sizes + 1 + group)[has]] & 0x7F) << (group * _GROUP_BITS)
    stops = np.cumsum([len(kept) for kept in sets], dtype=np.int64)
    last = np.searchsorted(ends, stops)  # numbers that end before each stop
    counts = np.diff(last, prepend=0)
    sums_n = np.cumsum(gaps_n + 1)
    before = np.concatenate([np.zeros(1, np.int64), sums_n])[last - counts]
    return counts, sums_n - 1 - np.repeat(before, counts)
