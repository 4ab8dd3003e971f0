"""A model of the same configuration, but with few layers, a small vocabulary and random weights.

What tensor parallelism cuts (heads, groups, widths, experts) is as large as in the model itself, and every kind of
layer is there, so whether the family's modules can be cut does not depend on which of the two is cut.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from plait.errors import ModelError
from plait.layout.caches import CacheShape
from plait.layout.mesh import Parallelism
from plait.models import scalar_loading
from plait.models.files.pretrained import new_module
from plait.models.language_loading import from_module
from plait.models.parallel.stage import PassingLayer, decoder_list
from plait.models.scalar_loading import ScalarHead

VOCABULARY = 509
"""Rows of the small embedding: no number of ranks divides it."""

MATRIX_NOISE, VECTOR_NOISE = 0.02, 0.1
"""Standard deviations of what is added to a family's own first values, which are zeros and ones where they are biases
and norms: an error there would not show."""

Kind = tuple[Any, ...]
"""What a decoder layer is made of: its modules with their shapes and settings. Layers alike have equal kinds."""


def kinds_of(model: Any) -> tuple[Kind, ...]:
    """Kinds of the layers of a whole model, perhaps without weights; empty where they are not in one list."""
    try:
        layers = decoder_list(model.module.base_model, model.parameters.num_layers)
    except ModelError:
        return ()
    return tuple(_kind(layer) for layer in layers)


def _kind(layer: nn.Module) -> Kind:
    parts: list[Any] = [(name, tuple(param.shape)) for name, param in layer.named_parameters()]
    for name, module in layer.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str) and not key.startswith("_") and key != "layer_idx"
        }
        parts.append((name, type(module).__qualname__, *sorted(plain.items())))
    return tuple(parts)


def scaled_down(model: Any, name: str, sizes: Parallelism, device: torch.device | str, *, scalar: bool) -> Any:
    """A small model with its first layers: so many that every kind is there, and every stage has one.

    Args:
        model: language or scalar model, perhaps without weights.
        name: for messages.
        scalar: which of the two it is.

    Returns:
        None where the configuration does not say how: a family of several configurations, or one whose fewer layers
        are of other kinds.

    Raises:
        ModelError: the self-check refuses the family.
    """
    kinds = kinds_of(model)
    if not kinds or model.config.get_text_config() is not model.config:
        return None
    num_layers = max(sizes.pp, 1 + max(kinds.index(kind) for kind in kinds))
    config = copy.deepcopy(model.config)
    for key, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == len(kinds) and not isinstance(value[0], float):
            setattr(config, key, value[:num_layers])  # of layers; floats are limits, or factors of a layer's parts
    config.num_hidden_layers = num_layers
    config.vocab_size = min(config.vocab_size, max(VOCABULARY, sizes.tp))
    config.pad_token_id = None
    small = _random(model.dtype, config, name, device, scalar=scalar)
    return small if kinds_of(small) == kinds[:num_layers] else None


def _random(dtype: torch.dtype, config: Any, name: str, device: torch.device | str, *, scalar: bool) -> Any:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        module = new_module(config, dtype, decoder_only=scalar)
        for param in module.parameters():
            param.add_(torch.randn_like(param), alpha=VECTOR_NOISE if param.ndim == 1 else MATRIX_NOISE)
    if not scalar:
        return from_module(module, None, str(dtype).removeprefix("torch."), device, name=name)
    head = ScalarHead(torch.linspace(-1, 1, config.hidden_size)[None], is_stored=False)
    small = scalar_loading.over_decoder(module, None, None, head, dtype, device)
    return scalar_loading.admitted(small, name)


@dataclass(frozen=True)
class Proven:
    """What is known of a family from a part of it.

    tuple_length: see `stage.PassingLayer`
    cache:         see `part.Part`
    """

    tuple_length: int
    cache: CacheShape | None

    @classmethod
    def of(cls, part: Any, kinds: Sequence[Kind], all_kinds: Sequence[Kind]) -> Proven:
        """
        Args:
            part: of a model whose layers have `kinds`.
            all_kinds: of the layers of the model that it stands for.
        """
        passing = next((m for m in part.module.modules() if isinstance(m, PassingLayer)), None)
        cache: CacheShape | None = part.part.cache
        if cache is not None and kinds:
            like = {layer.layer: layer for layer in cache.layers}
            first = [kinds.index(kind) for kind in all_kinds]
            every = tuple(
                replace(like[like_layer], layer=at) for at, like_layer in enumerate(first) if like_layer in like
            )
            cache = replace(cache, num_layers=len(all_kinds), layers=every)
        return cls(0 if passing is None else passing.tuple_length, cache)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made within it have parameters without memory; their buffers are real."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
