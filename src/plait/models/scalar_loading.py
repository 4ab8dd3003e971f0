"""Scalar models made: of a language model, or read from a checkpoint, with the head that is stored or drawn."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.layout.decoder import HEAD
from plait.layout.params import Param, Parameters
from plait.models.admission import self_check
from plait.models.backbone import Backbone
from plait.models.compute.attention import AttentionContext
from plait.models.compute.float64 import kept_float64
from plait.models.draws import generator
from plait.models.files.checkpoint_folder import index_of
from plait.models.files.claims import read_object
from plait.models.files.pretrained import generation_of
from plait.models.language_loading import eos_token_ids, max_positions, prepare, read_folder
from plait.models.language_model import LanguageModel
from plait.models.parallel.part import Part
from plait.models.scalar_model import ScalarModel, ScalarModule, own_head
from plait.models.working_weights import OwnPart, copy_module, dtype_of, layout_of, move_into_flat

_HEADS = ("score.", "classifier.", "v_head.", "value_head.")
"""How names begin of what a checkpoint has beside a decoder to score by."""


def scalar_of(model: LanguageModel, *, seed: int, head_std: float | None = None) -> ScalarModel:
    """A scalar model with a copy of a language model's decoder and a fresh head.

    Args:
        seed: of the head's draw; no global random state is read or moved.
        head_std: standard deviation of the head's weights, drawn from a normal distribution. None: 1 / sqrt(H + 1), as
            reward heads since Ziegler et al. 2019 (arXiv 1909.08593; Huang et al. 2024, arXiv 2403.17031): scores are
            then about as large as an entry of a hidden state. 0: every output is 0 at first, as value heads there.
    """
    view = scalar_view(model, seed=seed, head_std=head_std)
    layout = layout_of(view.module)
    module, weights = copy_module(view.module, layout)
    module.requires_grad_(True)
    return replace(
        view, module=module, layout=layout, weights=weights, backbone=Backbone(module.base_model), own=None, part=None
    )


def scalar_view(
    model: LanguageModel, *, seed: int, head_std: float | None = None, device: torch.device | str | None = None
) -> ScalarModel:
    """A scalar model on a language model's own decoder, without its adapter: nothing is copied, and the head alone is
    trained. `lora.add_lora` of it trains an adapter too.

    Args:
        seed, head_std: see `scalar_of`.
        device: that the head lies on; None: that of the decoder.
    """
    base = model if model.own is None else model.own.base
    decoder = base.module.base_model
    head_1H = _draw_head(decoder.config, seed, head_std)
    head = Param(HEAD, tuple(head_1H.shape), ends="last")
    own_part = OwnPart.allocate(
        Part(base.team, Parameters((head,))),
        lambda _: head_1H,
        base.weights,
        device,
        base=base,
        view_of=lambda other: scalar_view(other, seed=seed, head_std=head_std),
    )
    return ScalarModel(
        module=ScalarModule(decoder, own_head(own_part, decoder.config)),
        tokenizer=base.tokenizer,
        layout=base.layout,
        weights=base.weights,
        max_positions=base.max_positions,
        eos_token_ids=base.eos_token_ids,
        backbone=base.backbone,
        own=own_part,
        part=base.part,
    )


def load_scalar(
    name: str,
    *,
    dtype: str = "bfloat16",
    device: torch.device | str = "cpu",
    seed: int = 0,
    head_std: float | None = None,
) -> ScalarModel:
    """Resolve, read and admit a checkpoint: of a causal language model (its head is left out, a fresh scalar one drawn)
    or of a `...ForSequenceClassification` with one label (such as TRL's RewardTrainer and we write), head included.

    The latter's class reads the score at the last token that is not the padding token. Where the folder's padding
    token is an end-of-sequence token, that is the token before it, and so it is here (`passed_token_id`).

    Args:
        name: an alias, a local folder or a hub id (`models.files.hub.resolve`).
        dtype: compute dtype, a key of DTYPES; the weights are converted while they are read.
        seed, head_std: of a fresh head, see `scalar_of`.

    Raises:
        ModelError: not found, no safetensors, tensors missing, several labels, or refused by an admission check.
    """
    with without_reports():  # the head that is not the decoder's is expected
        decoder, tokenizer, folder = read_folder(name, dtype_of(dtype), decoder_only=True)
    head = head_of(folder, name, decoder.config, seed=seed, std=head_std)
    return admitted(over_decoder(decoder, tokenizer, folder, head, dtype_of(dtype), device), name)


@dataclass(frozen=True)
class ScalarHead:
    """The head that a scalar model begins with."""

    weight_1H: Tensor
    """On the CPU."""
    is_stored: bool
    """It comes with the checkpoint, whose class says where scores are read."""


def head_of(folder: Path, name: str, config: Any, *, seed: int, std: float | None) -> ScalarHead:
    """That of a classifier's folder, else a fresh one.

    Args:
        config: of the decoder.
        seed, std: of the draw, see `scalar_of`.

    Raises:
        ModelError: the folder is a classifier's of several labels, with a bias, or without its head.
    """
    stored_1H = _stored_head(folder, name, config)
    return ScalarHead(_draw_head(config, seed, std) if stored_1H is None else stored_1H, stored_1H is not None)


def over_decoder(
    decoder: Any,
    tokenizer: Any,
    folder: Path | None,
    head: ScalarHead,
    dtype: torch.dtype,
    device: torch.device | str,
) -> ScalarModel:
    """A scalar model on a decoder that a checkpoint's folder was read to; the decoder is taken over.

    Args:
        folder: of its generation configuration, if it has one.
        device: that it is to compute on. A decoder whose parameters are on the meta device gets its weights later, by
            `partial.take_weights`.
    """
    prepare(decoder, dtype, device)
    has_weights = not next(decoder.parameters()).is_meta
    module = ScalarModule(decoder, nn.Parameter(head.weight_1H))
    layout = layout_of(module)
    config = decoder.config.get_text_config()
    eos = eos_token_ids(generation_of(folder), config, tokenizer)
    if has_weights:
        weights = move_into_flat(module, layout, dtype, device)
    else:
        weights = torch.empty(layout.num_elements, dtype=dtype, device="meta")
    return ScalarModel(
        module=module,
        tokenizer=tokenizer,
        layout=layout,
        weights=weights,
        max_positions=max_positions(decoder),
        eos_token_ids=eos,
        backbone=Backbone(decoder),
        passed_token_id=config.pad_token_id if head.is_stored and config.pad_token_id in eos else None,
    )


def admitted(model: ScalarModel, name: str) -> ScalarModel:
    """The model, if it passes the self-check.

    Raises:
        ModelError: it does not.
    """
    self_check(_Decoder(model.module.base_model, model.weights, model.hidden), name)
    return model


@dataclass
class _Decoder:
    """The decoder as the self-check sees it: its hidden states stand for logits."""

    module: Any
    weights: Tensor
    hidden: Callable[[Tensor, Tensor, AttentionContext], Tensor]

    def logits(self, hidden_NH: Tensor) -> Tensor:
        return hidden_NH

    def eager_logits(self, token_ids_1T: Tensor) -> Tensor:
        with kept_float64(self.weights.dtype):
            return self.module(input_ids=token_ids_1T, use_cache=False).last_hidden_state[0]


def _draw_head(config: Any, seed: int, std: float | None) -> Tensor:
    """[1, H] float32 on the CPU."""
    hidden_size = config.get_text_config().hidden_size
    std = 1 / math.sqrt(hidden_size + 1) if std is None else std
    return torch.randn(1, hidden_size, generator=generator(seed, HEAD)) * std


def _stored_head(folder: Path, name: str, config: Any) -> Tensor | None:
    """The head [1, H] of a classifier's folder; None where it is none.

    Raises:
        ModelError: it has several labels, a bias or another head, or lacks its head.
    """
    from safetensors import safe_open

    if (index := index_of(folder)) is not None:
        file_of = read_object(index)["weight_map"]
    else:
        with safe_open(folder / "model.safetensors", "pt") as tensors:
            file_of = dict.fromkeys(tensors.keys(), "model.safetensors")
    is_classifier = any(cls.endswith("ForSequenceClassification") for cls in config.architectures or ())
    others = sorted(key for key in file_of if key.startswith(_HEADS) and key != HEAD)
    if not is_classifier and HEAD not in file_of and not others:
        return None
    if config.num_labels != 1 or HEAD not in file_of or others:
        parts = ", ".join([HEAD] * (HEAD in file_of) + others) or "none"
        raise ModelError(
            f"model: {name!r} is a classifier; expected one label (num_labels 1) and a head of {HEAD} alone, found "
            f"{config.num_labels} labels and a head of {parts}. Set the role's model to a reward model or a causal "
            "language model."
        )
    with safe_open(folder / file_of[HEAD], "pt") as tensors:
        head_1H = tensors.get_tensor(HEAD)
    expected = (1, config.get_text_config().hidden_size)
    if tuple(head_1H.shape) != expected:
        raise ModelError(f"model: {name!r}: expected {HEAD} of shape {expected}, found {tuple(head_1H.shape)}.")
    return head_1H


@contextlib.contextmanager
def without_reports() -> Iterator[None]:
    """Transformers says nothing of tensors that it does not use."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
