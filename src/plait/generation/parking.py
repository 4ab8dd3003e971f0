"""Keys and values of samples that stand still between two versions of the weights, and go on in the same engine.

They lie on the host: on a GPU, whose pool is about to be given back or to fill again, in pinned memory. What leaves
at a time is gathered together, by a few launches a layer for `CHUNK_BYTES` of it, however many samples that is; and
what comes back of one such chunk comes together. Nothing waits: both ways are in the order of the device's stream. On
a CPU each sample is a chunk of its own, whose memory is free when that sample goes on.

Shapes: n tokens of a chunk, those of its samples one behind another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from plait.data.host_device import computes_behind, stored, uploaded
from plait.generation import transfer
from plait.generation.pool import KVPool, Places, places_of
from plait.generation.request import Request
from plait.generation.response import Response
from plait.generation.transfer import Gathered, Place
from plait.policy.step import Key

if TYPE_CHECKING:
    from plait.generation.state import EngineState

CHUNK_BYTES = 1 << 26
"""Keys and values that are on their way to the host at a time. Pinned memory is taken in powers of two."""

Piece = tuple[Gathered, int, int, int]
"""(chunk, start, stop, first): the tokens start … stop − 1 of a chunk are a sample's, from its `first` on."""


@dataclass(frozen=True)
class Parked:
    """A sample that stands still, and where its keys and values lie."""

    token_ids: tuple[int, ...]
    """Said so far."""
    policy_version: int
    """The version of the weights that it left."""
    num_computed_tokens: int
    pieces: tuple[Piece, ...]


class Parking:
    """See the top of the file. What samples have said travels with their requests (`GoingOn`).

    Args:
        state: of the engine.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._parked: dict[Key, Parked] = {}
        self._returning: dict[Key, Parked] = {}
        """Those of samples that are here again, and do not run yet."""

    @cached_property
    def _place(self) -> Place:
        return Place.of(self._state.model)

    @property
    def _is_apart(self) -> bool:
        """Whether what is parked lies elsewhere than the pool."""
        return computes_behind(self._state.model.device)

    @property
    def num_bytes(self) -> int:
        """Memory of what is parked, on the host."""
        parked = (*self._parked.values(), *self._returning.values())
        chunks = {id(chunk): chunk for sample in parked for chunk, *_ in sample.pieces}
        return sum(chunk.kv.nbytes for chunk in chunks.values())

    @property
    def device_bytes(self) -> int:
        """As `num_bytes`, of what lies on the pool's device."""
        return 0 if self._is_apart else self.num_bytes

    def park(self, keys: Iterable[Key]) -> None:
        """Keep a copy of the keys and values of samples that are about to leave, until they come back or samples of a
        later version are parked. What is drawn between, as evaluations do, leaves them. A sample that came back and
        did not run has nothing that could be kept."""
        state, version = self._state, self._state.flight.policy_version
        find = state.scheduler.sequences.find
        counts, tables = dict[Key, int](), dict[Key, Sequence[int]]()
        for key in keys:
            sample = find(key)
            assert sample is not None, f"sample {key} has not started here, or has ended"
            if not sample.num_parked_tokens:
                counts[key], tables[key] = sample.num_computed_tokens, sample.table
        if not counts:
            return
        pieces: dict[Key, list[Piece]] = {key: [] for key in counts}
        for spans in self._chunks(counts):
            chunk, at = self._saved(spans, tables), 0
            for key, start, stop in spans:
                pieces[key].append((chunk, at, at + stop - start, start))
                at += stop - start
        parked = {
            key: Parked(tuple(state.flight.started[key].token_ids), version, count, tuple(pieces[key]))
            for key, count in counts.items()
        }
        self._parked = {key: one for key, one in self._parked.items() if one.policy_version == version} | parked

    def _chunks(self, counts: Mapping[Key, int]) -> Iterator[list[tuple[Key, int, int]]]:
        """Ranges [start, stop) of tokens of samples that lie in one chunk."""
        if not self._is_apart:
            yield from ([(key, 0, count)] for key, count in counts.items() if count)
            return
        most = max(1, CHUNK_BYTES // max(1, token_bytes(self._state.pool)))
        spans, room = list[tuple[Key, int, int]](), most
        for key, count in counts.items():
            start = 0
            while start < count:
                stop = min(count, start + room)
                spans.append((key, start, stop))
                start, room = stop, room - (stop - start)
                if room == 0:
                    yield spans
                    spans, room = [], most
        if spans:
            yield spans

    def _saved(self, spans: Sequence[tuple[Key, int, int]], tables: Mapping[Key, Sequence[int]]) -> Gathered:
        """What stands in ranges of tokens of samples with these tables."""
        pool, place = self._state.pool, self._place
        places = self._places([(tables[key], start, stop) for key, start, stop in spans])
        chunk = transfer.gather(place.shape(pool), places, pool, place)
        return replace(chunk, kv=stored(chunk.kv)) if self._is_apart else chunk

    def _places(self, spans: Sequence[tuple[Sequence[int], int, int]]) -> Places:
        """The places of ranges of tokens of some tables, one behind another."""
        pool = self._state.pool
        places = np.concatenate([places_of(table, start, stop, pool.block_tokens) for table, start, stop in spans])
        return Places(uploaded(places, torch.int64, self._state.model.device), pool.block_tokens)

    def resume(self, request: Request) -> None:
        """Samples of a request that have begun before go on. What is parked comes into the pool when its sample runs
        (`bring`): more may come back than there is room for at a time."""
        state, flight = self._state, self._state.flight
        prompt, names = request.prompt, state.pool.names(request.prompt.token_ids)
        for sample in request.going_on.begun:
            key = (prompt.uid, sample.index)
            limit = request.limit(sample.index, state.model.max_positions)
            parked = self._parked.pop(key, None)
            response = Response.resumed(request, sample, limit, state.model.eos_token_ids, flight.policy_version)
            if sample.index not in request.going_on.keeps:
                parked = None
            else:
                assert parked is not None, f"sample {key} is to be kept, and is not parked here"
                assert parked.token_ids == sample.all_ids, f"sample {key} was parked with other tokens"
            count, rollout = len(response.tokens), request.noise.rollout
            # One that gave way before it was parked, and was not computed again, is computed by the new weights.
            if parked is not None and parked.num_computed_tokens == count - 1:
                state.scheduler.add_started(key, count, count - 1, names, is_parked=True, rollout=rollout)
                self._returning[key] = parked
            else:  # a next turn finds the blocks of the turns before it, too, as far as they are cached
                known = state.pool.names(response.tokens[:-1]) if sample.replies else names
                state.scheduler.add_started(key, count, 0, known, rollout=rollout)
            flight.started[key] = response

    def bring(self, keys: Iterable[Key]) -> None:
        """Write what was parked into the blocks of samples that run from now on."""
        state = self._state
        of_chunks: dict[Gathered, list[tuple[Key, int, int, int]]] = {}
        for key in keys:
            for chunk, start, stop, first in self._returning.pop(key).pieces:
                of_chunks.setdefault(chunk, []).append((key, start, stop, first))
        for chunk, pieces in of_chunks.items():
            here = replace(chunk, kv=chunk.kv.to(state.model.device, non_blocking=True))
            tables = [(state.scheduler.running[key].table, at, at + stop - start) for key, start, stop, at in pieces]
            columns = [(start, stop) for _, start, stop, _ in pieces]
            transfer.scatter(here, columns, self._places(tables), state.pool, self._place)

    def rest(self) -> None:
        """Nothing is in flight: forget what has not come into the pool."""
        self._returning.clear()


def token_bytes(pool: KVPool) -> int:
    """Bytes of a token in all layers of a pool."""
    tensors = [*(tensor for kv in pool.layers.values() for tensor in (kv.key, kv.value)), *pool.experts.values()]
    return sum(tensor[0].nbytes for tensor in tensors) // pool.block_tokens
