"""Load a language model by any name that a user may give: a whole checkpoint, or an adapter with the model under it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from plait.errors import ModelError
from plait.models import language_loading
from plait.models.files.adapter_folder import adapter_of, base_missing
from plait.models.files.pretrained import tokenizer_of
from plait.models.language_model import LanguageModel


def load_model(name: str, *, dtype: str = "bfloat16", device: torch.device | str = "cpu") -> LanguageModel:
    """`language_loading.load_model`, where the name may also be a folder with a LoRA adapter: its base is found by what
    the adapter says, and computes with the un-merged adapter, as in training.

    Raises:
        ModelError: see there; the base cannot be had, or the adapter does not fit it.
    """
    adapter = adapter_of(name)
    if adapter is None:
        return language_loading.load_model(name, dtype=dtype, device=device)
    from plait.models.lora_files import load_adapter

    try:
        base = language_loading.load_model(adapter.base, dtype=dtype, device=device)
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
