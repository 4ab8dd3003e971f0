"""A sample that goes on in another engine: what it is, and its keys and values as a slice of a layout.

The state is plain data, but for `kv`: one flat buffer with the keys and values of a range of tokens, as `holdings`
describes it, so that the mover (`reallocation`) carries it between ranks like weights. A transfer has two stages: the
bulk while the source goes on (`export_sample(..., final=False)`), then the rest with the tokens said meanwhile
(`export_sample(..., since=first.stop)`).

Shapes: n tokens of the range, Hkv key heads, D and E head sizes of keys and of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.generation import noise
from plait.generation.pool import KVPool
from plait.generation.request import Request
from plait.generation.response import Response
from plait.layout.holdings import Box, Holdings, packed
from plait.layout.params import Heads, Param
from plait.policy.batching import Started


@dataclass(frozen=True)
class LayerShape:
    """Keys [Hkv, n, key_dim] and values [Hkv, n, value_dim] of one layer."""

    layer: int
    groups: int
    """Hkv."""
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class SampleState:
    """A sample between two tokens, with keys and values of the tokens start … stop − 1 of its context."""

    request: Request
    index: int
    token_ids: tuple[int, ...]
    """Said so far; the newest has no key and value yet."""
    logprobs: tuple[float, ...]
    version_starts: tuple[tuple[int, int], ...]
    """(first token, policy version) of each stretch."""
    start: int
    stop: int
    epoch: int
    """Of the source's weights: stages of different epochs do not go together."""
    num_heads: int
    """Query heads of the model."""
    shapes: tuple[LayerShape, ...]
    kv: Tensor
    """Flat, in the compute dtype."""

    def holdings(self, rank: int, buffer: str = "kv") -> Holdings:
        """Where `kv` lies on a rank that has all of it, for `layout.move.plan_move`."""
        return holdings(self.shapes, self.num_heads, self.stop - self.start, self.dtype, rank, buffer)

    @property
    def dtype(self) -> str:
        return str(self.kv.dtype).removeprefix("torch.")

    def response(self, max_positions: int, eos_token_ids: tuple[int, ...], policy_version: int) -> Response:
        """The sample in an engine whose next token is of `policy_version`."""
        stop = self.request.sampling.stop_token_ids
        starts = list(self.version_starts)
        if starts[-1][1] != policy_version:
            starts.append((len(self.token_ids), policy_version))
        return Response(
            self.request,
            self.index,
            limit=self.request.limit(self.index, max_positions),
            noise_key=noise.signed(self.request.noise.sample_key(self.request.prompt.uid, self.index)),
            stop_token_ids=frozenset(eos_token_ids if stop is None else stop),
            version_starts=starts,
            token_ids=list(self.token_ids),
            logprobs=list(self.logprobs),
        )


def parameters(shapes: Sequence[LayerShape], num_heads: int, num_tokens: int) -> tuple[Param, ...]:
    """Keys and values of a range of tokens as logical tensors [Hkv, n, dim], cut by key head."""
    return tuple(
        Param(
            f"kv/{shape.layer}/{what}",
            (shape.groups, num_tokens, dim),
            shape.layer,
            0,
            heads=Heads(max(num_heads, shape.groups), shape.groups, shared=True),
        )
        for shape in shapes
        for what, dim in (("key", shape.key_dim), ("value", shape.value_dim))
    )


def holdings(
    shapes: Sequence[LayerShape], num_heads: int, num_tokens: int, dtype: str, rank: int, buffer: str = "kv"
) -> Holdings:
    """All of them on one rank, one after another in one buffer."""
    params = parameters(shapes, num_heads, num_tokens)
    boxes = [(number, Box(0, 1, 0, param.extent, 0, param.grid[2])) for number, param in enumerate(params)]
    return packed(params, dtype, {rank: boxes if num_tokens else []}, buffer)


def export(response: Response, held: Started, pool: KVPool, since: int, *, epoch: int, num_heads: int) -> SampleState:
    """The state of a sample, with a copy of what the pool holds of it from token `since` on."""
    start, stop = since, max(since, held.held)
    shapes = tuple(
        LayerShape(layer, kv.key.shape[1], kv.key.shape[3], kv.value.shape[3])
        for layer, kv in sorted(pool.layers.items())
    )
    like = next(iter(pool.layers.values())).key if pool.layers else torch.zeros(0)
    dtype = str(like.dtype).removeprefix("torch.")
    layout = holdings(shapes, num_heads, stop - start, dtype, 0)
    flat = like.new_zeros(layout.buffers[0]["kv"])
    if stop > start:
        for shape, key, value in _views(shapes, layout, flat, stop - start):
            kv = pool.read(shape.layer, held.table, start, stop)
            key.copy_(kv.key)
            value.copy_(kv.value)
    return SampleState(
        response.request,
        response.index,
        tuple(response.token_ids),
        tuple(response.logprobs),
        tuple(response.version_starts),
        start,
        stop,
        epoch,
        num_heads,
        shapes,
        flat,
    )


def contiguous(stages: Sequence[SampleState]) -> int:
    """Tokens from the first on whose keys and values the stages bring, and that belong to the last one's weights."""
    held = 0
    for stage in stages:
        if stage.start == held and stage.epoch == stages[-1].epoch:
            held = stage.stop
    return held


def write(stages: Sequence[SampleState], table: Sequence[int], pool: KVPool) -> None:
    """Put keys and values of the stages into the blocks of a table."""
    size, held = pool.block_tokens, 0
    for stage in stages:
        if stage.start != held or stage.epoch != stages[-1].epoch or stage.stop == stage.start:
            continue
        held = stage.stop
        places = [table[at // size] * size + at % size for at in range(stage.start, stage.stop)]
        places_T = torch.tensor(places, device=stage.kv.device)
        layout = holdings(stage.shapes, stage.num_heads, stage.stop - stage.start, stage.dtype, 0)
        for shape, key, value in _views(stage.shapes, layout, stage.kv, stage.stop - stage.start):
            pool.write(shape.layer, places_T, key, value)


def _views(
    shapes: Sequence[LayerShape], layout: Holdings, flat: Tensor, num_tokens: int
) -> list[tuple[LayerShape, Tensor, Tensor]]:
    """Of each layer the keys [Hkv, n, D] and values [Hkv, n, E] within the flat buffer."""
    held = iter(layout.ranks[0])
    found = []
    for shape in shapes:
        pair = []
        for dim in (shape.key_dim, shape.value_dim):
            offset, size = next(held).offset, shape.groups * num_tokens * dim
            pair.append(flat[offset : offset + size].view(shape.groups, num_tokens, dim))
        found.append((shape, *pair))
    return found
