"""Load a model by any name that a user may give: a whole checkpoint, or an adapter with the model under it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from plait.errors import ModelError
from plait.models import language_loading, scalar_loading
from plait.models.files.adapter_folder import AdapterFolder, adapter_of, base_missing
from plait.models.files.pretrained import tokenizer_of
from plait.models.language_model import LanguageModel
from plait.models.model import AnyModel
from plait.models.scalar_model import ScalarModel

Adapt = Callable[[AnyModel, AdapterFolder], AnyModel]
"""Puts an adapter on its base."""


def beside(name: str, device: torch.device | str | None = None) -> Adapt:
    """Adapters stay beside the weights under them, as in training with `lora`.

    Args:
        name: of the adapter, among those of a backbone.
        device: that it lies on; None: that of the weights.
    """
    from plait.models.lora_files import load_adapter

    return lambda base, adapter: load_adapter(base, adapter.folder, name=name, device=device)


def without(base: AnyModel, adapter: AdapterFolder) -> AnyModel:
    """The base alone: adapters come later."""
    return base


def merged(base: AnyModel, adapter: AdapterFolder) -> AnyModel:
    """The base, with the adapter merged into its weights."""
    from plait.models.lora_merging import merge

    merge(base, adapter)
    return base


def load_model(
    name: str, *, dtype: str = "bfloat16", device: torch.device | str = "cpu", adapt: Adapt | None = None
) -> LanguageModel:
    """`language_loading.load_model`, where the name may also be a folder with a LoRA adapter: its base is found by what
    the adapter says.

    Args:
        adapt: None: the adapter stays beside the weights.

    Raises:
        ModelError: see there; the base cannot be had, or the adapter does not fit it.
    """
    return over_base(name, partial(language_loading.load_model, dtype=dtype, device=device), adapt or beside("adapter"))


def load_scalar(
    name: str,
    *,
    dtype: str = "bfloat16",
    device: torch.device | str = "cpu",
    seed: int = 0,
    head_std: float | None = None,
    adapt: Adapt | None = None,
) -> ScalarModel:
    """`scalar_loading.load_scalar`, where the name may also be a folder with the adapter and the head of a scalar
    model, or the adapter of a language model, for which the head is drawn; `adapt` as of `load_model`.

    Raises:
        ModelError: see there, and `load_model`.
    """
    read = partial(scalar_loading.load_scalar, dtype=dtype, device=device, seed=seed, head_std=head_std)
    return over_base(name, read, adapt or beside("adapter"))


def over_base(name: str, read: Callable[[str], AnyModel], adapt: Adapt) -> AnyModel:
    """What `read` makes of a checkpoint; of an adapter's folder, of its base, with the adapter on it.

    Raises:
        ModelError: the base cannot be had, or what `read` and `adapt` raise.
    """
    adapter = adapter_of(name)
    if adapter is None:
        return read(name)
    try:
        base = read(adapter.base)
    except ModelError as error:
        raise base_missing(name, adapter, error) from error
    model = adapt(base, adapter)
    if not adapter.has_tokenizer:
        return model
    tokenizer = tokenizer_of(adapter.folder, name)
    if isinstance(model, ScalarModel) and adapter.scores and tokenizer.pad_token_id in model.eos_token_ids:
        model = replace(model, passed_token_id=tokenizer.pad_token_id)
    return replace(model, tokenizer=tokenizer)


def read_tokens(name: str) -> tuple[Any, tuple[int, ...]]:
    """The tokenizer and the end tokens of the model that `load_model` gives. Reads no weights.

    Raises:
        ModelError: see there.
    """
    adapter = adapter_of(name)
    if adapter is None:
        return language_loading.read_tokens(name)
    tokenizer, ends = language_loading.read_tokens(adapter.base)
    return tokenizer_of(adapter.folder, name) if adapter.has_tokenizer else tokenizer, ends
