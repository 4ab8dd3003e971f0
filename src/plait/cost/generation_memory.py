"""Bytes that generation takes, before anything is loaded. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from plait.cost.shape_parameters import packed_adapter_parameters
from plait.layout.mesh import Parallelism
from plait.layout.params import Heads
from plait.layout.shards import stage_bounds
from plait.models.lora_settings import NO_LORA, LoraSettings
from plait.models.shape import ModelShape
from plait.training.memory import BYTES

ROUTED_BYTES = 2
"""Bytes of an expert's number in a pool."""


@dataclass(frozen=True)
class EngineBytes:
    """Bytes of an engine. held: all the time; widened: more, where a draft model's packed weights are widened;
    is_whole: whether that is so only where an instance is of one rank"""

    held: int = 0
    widened: int = 0
    is_whole: bool = False


def kv_bytes_per_token(shape: ModelShape, dtype: str) -> int:
    return 2 * shape.attending * shape.kv_heads * shape.head_dim * BYTES[dtype]


def routed_bytes_per_token(shape: ModelShape, first: int, stop: int) -> int:
    """What a pool keeps beside keys and values of the layers from `first` on, before `stop`, where samples say which
    experts tokens went to: two bytes for each, on every rank of tensor parallelism."""
    return _mixtures_in(shape, first, stop) * shape.experts_per_token * ROUTED_BYTES


def _mixtures_in(shape: ModelShape, first: int, stop: int) -> int:
    """Layers with experts among these."""
    if not shape.mixtures:
        return min(shape.expert_layers, stop - first)
    return sum(first <= layer < stop for layer in shape.mixtures)


def state_bytes(shape: ModelShape, dtype: str, running: int, sizes: Parallelism) -> tuple[int, ...]:
    """What recurrent layers have of so many samples that run, on the device of each stage that has
    most: slots are more by half, as they grow so."""
    of_layer = round(shape.mixer.state_bytes(BYTES[dtype]) * shape.mixer.most(sizes.tp)) * running
    bounds = stage_bounds(shape.layers, sizes)
    return tuple(shape.recurrent_in(start, stop) * of_layer * 3 // 2 for start, stop in pairwise(bounds))


def asked_tokens(running: int, context_tokens: int, root_tokens: int) -> int:
    """Whose keys and values samples hold at most at a time, in a pool that has room for all of them.

    Args:
        context_tokens: of the longest prompt with its response.
        root_tokens: of these, what all samples begin with and hold together.
    """
    return root_tokens + running * (context_tokens - root_tokens)


def pool_tokens(asked: int, kv_tokens: int, device: str) -> int:
    """For which a pool takes memory: on a CPU page by page as they come, on a GPU all that it may hold at once.

    Args:
        asked: see `asked_tokens`.
    """
    return kv_tokens if device == "cuda" else min(asked, kv_tokens)


def packed_bytes(shape: ModelShape, dtype: str, lora: LoraSettings = NO_LORA) -> int:
    """Bytes of the linear layers and the head once more, and of their adapters."""
    return packed_stages(shape, dtype, lora, Parallelism())[0]


def packed_stages(shape: ModelShape, dtype: str, lora: LoraSettings, sizes: Parallelism) -> tuple[int, ...]:
    """`packed_bytes` of each stage, on the device that has most of it."""
    head, packed = shape.hidden * -(-shape.vocabulary // sizes.tp), []
    for first, stop in pairwise(stage_bounds(shape.layers, sizes)):
        experts = _mixtures_in(shape, first, stop)
        own = lambda layers, first=first, stop=stop: tuple(at - first for at in layers if first <= at < stop)
        stage = replace(
            shape,
            layers=stop - first,
            expert_layers=experts,
            mixtures=(),
            windows=(),
            recurrent=own(shape.recurrent),
            attends=None if shape.attends is None else own(shape.attends),
            without_mlp=own(shape.without_mlp),
        )
        linear = _linear_parameters(stage, sizes.tp) + packed_adapter_parameters(stage, lora)
        packed.append((linear + (head if stop == shape.layers else 0)) * BYTES[dtype])
    return tuple(packed)


def widened_bytes(packed: int, dtype: str) -> int:
    """What `packed_bytes` may take on top: a CPU without AVX-512 packs bfloat16 as float32 where the model's own layers
    compute, and whether they do is known only when the model is loaded."""
    return packed if dtype == "bfloat16" else 0


def _linear_parameters(shape: ModelShape, tp: int) -> int:
    heads = Heads(shape.heads, shape.kv_heads)
    most = max(stop - first for first, stop in (heads.part_range(i, tp) for i in range(tp)))
    dense = shape.dense_layers * shape.mlp_matrices * shape.hidden * -(-shape.intermediate // tp)
    attention = shape.attending * shape.attention_parameters * most // shape.heads
    return attention + round(len(shape.recurrent) * shape.mixer.parameters * shape.mixer.most(tp)) + dense
