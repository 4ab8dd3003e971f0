"""What the self-check of a model's layers will say, before there are weights (check (c) of `models.admission`).

The module of a configuration is made on the meta device, where tensors have shapes and no numbers, and computes the few
tokens of the self-check there. That tells which layers ask our forward for what, and whether recurrent layers
read it; and whether its head runs. It does not tell numbers: whether they are right is seen with the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.utils import logging

from plait.errors import ModelError
from plait.models.admission import check_batch, check_config, refusal
from plait.models.compute.attention_form import AttentionForm
from plait.models.compute.recurrent import Mixer
from plait.models.files.pretrained import new_module
from plait.models.head import family_head
from plait.models.language_loading import without_weights
from plait.models.layer_calls import LayerCalls
from plait.models.mixer_proof import forgetful_mixer
from plait.models.scalar_loading import without_reports

META = torch.device("meta")
DTYPE = torch.bfloat16
"""In which grouped products of experts exist for the meta device."""


class _Asked(LayerCalls):
    """Remembers who asks for what, and gives tensors without numbers."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """See `AttentionContext.attend`: [Hq, T, D], [Hkv, T, D] and [Hkv, T, E] to [T, Hq, E]."""
        self.calls.append((layer, form.window))
        return value.new_empty(query.shape[1], query.shape[0], value.shape[-1])

    def mix(self, layer: int, hidden_TH: Tensor, mixer: Mixer) -> Tensor:
        """See `RecurrentContext.mix`: [T, H] → [T, H]."""
        self.mixed.append(layer)
        return torch.empty_like(hidden_TH)


def check_foreseen(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Do all checks that need no weights. Returns and raises as `admission.check_config`."""
    fields = check_config(config, name)
    check_layers(config, name)
    return fields


def check_layers(config: Mapping[str, Any], name: str) -> None:
    """Refuse what the self-check would refuse whatever the weights are. What cannot be computed without numbers is left
    to it.

    Args:
        config: a `config.json` that `admission.check_config` has seen.

    Raises:
        ModelError: the family is refused.
    """
    text = json.dumps(config, sort_keys=True)
    if (cause := _cause(text)) is not None:
        raise refusal(_read(text), name, "self-check", cause)


@lru_cache(maxsize=16)
def _cause(text: str) -> str | None:
    """Why the self-check would refuse a `config.json`; None: nothing is known against it, or it asks for a number."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _unsaid():
            return _fault(_read(text))
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, NotImplementedError) as error:
        if isinstance(error, ModelError):
            raise
        return None


@contextmanager
def _unsaid() -> Iterator[None]:
    """Transformers tells later, of what is computed with weights, which kernels are not installed: it says it once."""
    try:
        with without_reports():
            yield
    finally:
        logging.warning_once.cache_clear()


def _fault(config: Any) -> str | None:
    with META:
        module = new_module(config, DTYPE, decoder_only=False)
    if (forgetful := forgetful_mixer(module)) is not None:
        return forgetful
    model = without_weights(module, None, DTYPE, META)
    family_head(module)
    batch, _ = check_batch(module, META)
    asked = _Asked(batch)
    model.hidden(batch.token_ids_T, batch.position_ids_T, asked)
    return asked.fault(module.config)


def _read(text: str) -> Any:
    fields = json.loads(text)
    return CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
