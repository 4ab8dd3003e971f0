"""A sample that goes on in another engine: what it is, and its keys and values as a slice of a layout.

The state is plain data, but for `kv`: one flat buffer with the keys and values of a range of tokens, as `holdings`
describes it, so that the mover (`reallocation`) carries it between ranks like weights. A transfer has two stages: the
bulk while the source goes on (`export_sample(..., final=False)`), then the rest with the tokens said meanwhile
(`export_sample(..., since=first.stop)`); both are of `moves.SampleMoves`.

A rank of an instance has some layers and some heads of each; `kv` is what this rank has.

Shapes: n tokens of the range, Hkv key heads of this rank, D and E head sizes of keys and of values, X experts for each
token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from plait.errors import ModelError
from plait.generation.pool import KVPool, Places
from plait.generation.request import Request
from plait.generation.response import Response
from plait.layout.caches import CacheShape, LayerCache, What, cache, cache_parameters
from plait.layout.holdings import Holdings
from plait.layout.mesh import Layout
from plait.models.language_model import LanguageModel
from plait.models.routers import mixtures_of, sizes_of

VOLATILE = ("dtype", "torch_dtype", "transformers_version", "use_cache")
"""Fields of a configuration that do not say what the model is."""


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
    num_computed_tokens: int
    """From the first on, whose keys and values the source has: more than `stop` where others follow."""
    epoch: int
    """Epoch of the source's weights: stages of different epochs do not go together."""
    policy_version: int
    """Version of the source's weights."""
    is_current: bool
    """All that the source has of it was computed with these weights, so others of its prompt may share."""
    shape: CacheShape
    model: str
    """`Place.fingerprint` of the source."""
    start: int
    stop: int
    kv: Tensor
    """Flat, in the compute dtype."""
    supports: tuple[bytes, ...]
    """As of `Response`."""

    @property
    def key(self) -> tuple[int, int]:
        return self.request.prompt.uid, self.index

    @property
    def dtype(self) -> str:
        return str(self.kv.dtype).removeprefix("torch.")

    def holdings(self, instance: Layout, buffer: str = "kv") -> Holdings:
        """Where keys and values of this range lie on the ranks of an instance, for `layout.move.plan_move`."""
        return holdings(self.shape, [self.stop - self.start], instance, self.dtype, buffer)

    def response(self, max_positions: int, eos_token_ids: tuple[int, ...], policy_version: int) -> Response:
        """The sample in an engine whose next token is of `policy_version`."""
        limit = self.request.limit(self.index, max_positions)
        response = Response.of(self.request, self.index, limit, eos_token_ids, self.version_starts)
        response.go_on(self.token_ids, self.logprobs, policy_version, self.supports)
        return response


@dataclass(frozen=True)
class Place:
    """A rank of an instance, whose pool holds its part of all keys and values."""

    model: LanguageModel
    instance: Layout
    rank: int

    @classmethod
    def of(cls, model: LanguageModel) -> Place:
        team = model.team
        own = next(instance for instance in team.layout.instances() if team.rank in instance.mesh.ranks)
        return cls(model, own, team.rank)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the model's configuration, which parts and copies of it share, in whatever dtype."""
        fields = self.model.config.get_text_config().to_dict()
        kept = {name: value for name, value in fields.items() if name[0] != "_" and name not in VOLATILE}
        text = json.dumps(kept, sort_keys=True, default=str).encode()
        return hashlib.blake2b(text, digest_size=8).hexdigest()

    def shape(self, pool: KVPool) -> CacheShape:
        """What the instance keeps of a token.

        Raises:
            ModelError: the model is in parts, and it is not known which heads a rank has.
        """
        part = self.model.part
        if part is not None and not part.is_whole:
            if part.cache is None:
                raise ModelError(
                    f"model: it is not known which key-value heads a rank of {type(self.model.module).__name__} has, "
                    "so its samples cannot move; set tp of the generation instances to 1"
                )
            return self._with_experts(part.cache, pool)
        layers = [
            LayerCache(layer, kv.key.shape[1], kv.key.shape[3], kv.value.shape[3])
            for layer, kv in sorted(pool.layers.items())
        ]
        heads = self.model.config.get_text_config().num_attention_heads
        shape = CacheShape(1 + max((cached.layer for cached in layers), default=0), heads, tuple(layers))
        return self._with_experts(shape, pool)

    def _with_experts(self, shape: CacheShape, pool: KVPool) -> CacheShape:
        """With those that the pool keeps."""
        if not pool.keeps_experts:
            return shape
        mixtures, (_, top_k) = mixtures_of(self.model.parameters), sizes_of(self.model.config)
        layers = (replace(cached, experts=top_k * (cached.layer in mixtures)) for cached in shape.layers)
        return replace(shape, layers=tuple(layers))


def holdings(shape: CacheShape, lengths: Sequence[int], instance: Layout, dtype: str, buffer: str = "kv") -> Holdings:
    """Keys and values of ranges of tokens on the ranks of an instance, one range after another in one buffer."""
    return cache(cache_parameters(shape, lengths), shape, [instance] * len(lengths), dtype, buffer)


def parts(held: Holdings, shape: CacheShape, count: int, rank: int, flat: Tensor) -> list[Tensor]:
    """The buffer of a rank [elements], cut into views: as `holdings` of each of `count` ranges alone has it."""
    mine, per_range = held.ranks.get(rank, ()), len(shape.parts)
    sizes = [0] * count
    for number, holding in enumerate(mine):
        end = mine[number + 1].offset if number + 1 < len(mine) else len(flat)
        sizes[holding.param // per_range] += end - holding.offset
    return list(flat.split(sizes))


def read(
    shape: CacheShape,
    table: Sequence[int],
    pool: KVPool,
    place: Place,
    tokens: tuple[int, int],
    out: Tensor | None,
) -> Tensor:
    """A copy of what the pool holds of the tokens start … stop − 1 of a sample, as `holdings` describes it.

    Args:
        table: blocks of the sample.
        tokens: (start, stop).
        out: where the copy goes, flat, in the dtype of the pool; by default to new memory.

    Returns:
        [elements of the layout], layer after layer.
    """
    start, stop = tokens
    places = Places.of(table, start, stop, pool.block_tokens, _device(pool) if out is None else out.device)
    return gather(shape, places, pool, place, out).kv


@dataclass(frozen=True, eq=False)
class Gathered:
    """Keys and values of some tokens, of one sample or of several."""

    shape: CacheShape
    kv: Tensor
    """As `holdings` has those of one range of so many tokens."""
    num_tokens: int


def gather(shape: CacheShape, places: Places, pool: KVPool, place: Place, out: Tensor | None = None) -> Gathered:
    """A copy of what the pool holds in some places: as many launches a layer for many samples as for one.

    Args:
        places: of n tokens.
        out: [elements], as of `read`.
    """
    like = next(iter(pool.layers.values())).key if pool.layers else torch.zeros(0)
    num_tokens = len(places.places_T)
    layout = holdings(shape, [num_tokens], place.instance, str(like.dtype).removeprefix("torch."))
    if out is None:
        out = like.new_zeros(layout.buffers.get(place.rank, {}).get("kv", 0))
    for layer, views in _views(shape, layout, place.rank, out, num_tokens):
        kv = pool.read(layer.layer, places)
        views[What.KEY].copy_(kv.key)
        views[What.VALUE].copy_(kv.value)
        if layer.experts:
            bits = views[What.EXPERTS].view(_INTEGERS[out.itemsize])
            bits[0] = pool.read_experts(layer.layer, places.places_T)
    return Gathered(shape, out, num_tokens)


def scatter(gathered: Gathered, columns: Sequence[tuple[int, int]], places: Places, pool: KVPool, place: Place) -> None:
    """Put some of what was gathered into a pool of the same device.

    Args:
        columns: ranges [start, stop) of its tokens; one behind another they go to `places`.
    """
    kv, shape = gathered.kv, gathered.shape
    layout = holdings(shape, [gathered.num_tokens], place.instance, str(kv.dtype).removeprefix("torch."))
    for layer, views in _views(shape, layout, place.rank, kv, gathered.num_tokens):
        key, value = (_joined(views[what], columns) for what in (What.KEY, What.VALUE))
        pool.write(layer.layer, places, key, value)
        if layer.experts:
            bits = views[What.EXPERTS].view(_INTEGERS[kv.itemsize])
            pool.write_experts(layer.layer, places.places_T, _joined(bits, columns)[0])


def _joined(of_tokens: Tensor, columns: Sequence[tuple[int, int]]) -> Tensor:
    """[H, n, …] of those of the tokens [H, N, …] that stand in these ranges."""
    parts = [of_tokens[:, start:stop] for start, stop in columns]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _device(pool: KVPool) -> torch.device:
    """Where a pool lies, if it holds anything."""
    return next((kv.key.device for kv in pool.layers.values()), torch.device("cpu"))


def contiguous(stages: Sequence[SampleState], here: int) -> int:
    """Tokens from the first on that are here: the first `here`, and what stages of the last one's weights bring."""
    for stage in sorted(stages, key=lambda stage: stage.start):
        if stage.epoch == stages[-1].epoch and stage.start <= here:
            here = max(here, stage.stop)
    return here


def write(stages: Sequence[SampleState], table: Sequence[int], pool: KVPool, place: Place, here: int) -> None:
    """Put keys and values of the stages into the blocks of a table; those of the first `here` tokens are there."""
    for stage in sorted(stages, key=lambda stage: stage.start):
        if stage.epoch != stages[-1].epoch or not stage.start <= here < stage.stop:
            continue
        places = Places.of(table, here, stage.stop, pool.block_tokens, stage.kv.device)
        layout, first = stage.holdings(place.instance), here - stage.start
        for layer, views in _views(stage.shape, layout, place.rank, stage.kv, stage.stop - stage.start):
            pool.write(layer.layer, places, views[What.KEY][:, first:], views[What.VALUE][:, first:])
            if layer.experts:
                bits = views[What.EXPERTS].view(_INTEGERS[stage.kv.itemsize])
                pool.write_experts(layer.layer, places.places_T, bits[0, first:])
        here = stage.stop


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a number → the integers whose bits lie among such numbers."""


def _views(
    shape: CacheShape, layout: Holdings, rank: int, flat: Tensor, num_tokens: int
) -> Iterator[tuple[LayerCache, dict[What, Tensor]]]:
    """Keys [Hkv, n, D], values [Hkv, n, E] and experts [1, n, X] of each layer of a rank, within the flat buffer."""
    of_layer = lambda holding: shape.parts[holding.param][0]
    for layer, holdings_of in groupby(layout.ranks.get(rank, ()), of_layer):
        views = {}
        for holding in holdings_of:
            part, what = flat[holding.offset : holding.offset + holding.box.num_elements], shape.parts[holding.param][1]
            views[what] = part.view(-1, num_tokens, what.dim(layer))
        yield layer, views
