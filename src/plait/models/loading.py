"""Load a model by any name that a user may give: a whole checkpoint, or an adapter with the model under it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from plait.errors import ModelError
from plait.models import language_loading, scalar_loading
from plait.models.files.adapter_folder import adapter_of, base_missing
from plait.models.files.pretrained import tokenizer_of
from plait.models.language_model import LanguageModel
from plait.models.model import AnyModel
from plait.models.scalar_model import ScalarModel


def load_model(name: str, *, dtype: str = "bfloat16", device: torch.device | str = "cpu") -> LanguageModel:
    """`language_loading.load_model`, where the name may also be a folder with a LoRA adapter: its base is found by what
    the adapter says, and computes with the un-merged adapter, as in training.

    Raises:
        ModelError: see there; the base cannot be had, or the adapter does not fit it.
    """
    return _over_base(name, partial(language_loading.load_model, dtype=dtype, device=device))


def load_scalar(
    name: str,
    *,
    dtype: str = "bfloat16",
    device: torch.device | str = "cpu",
    seed: int = 0,
    head_std: float | None = None,
) -> ScalarModel:
    """`scalar_loading.load_scalar`, where the name may also be a folder with the adapter and the head of a scalar
    model.

    Raises:
        ModelError: see there, and `load_model`.
    """
    read = partial(scalar_loading.load_scalar, dtype=dtype, device=device, seed=seed, head_std=head_std)
    return _over_base(name, read)


def _over_base(name: str, read: Callable[[str], AnyModel]) -> AnyModel:
    """What `read` makes of a checkpoint; of an adapter's folder, of its base, with the adapter on it."""
    adapter = adapter_of(name)
    if adapter is None:
        return read(name)
    from plait.models.lora_files import load_adapter

    try:
        base = read(adapter.base)
    except ModelError as error:
        raise base_missing(name, adapter, error) from error
    view = load_adapter(base, adapter.folder, name="adapter")
    return replace(view, tokenizer=tokenizer_of(adapter.folder, name)) if adapter.has_tokenizer else view


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
