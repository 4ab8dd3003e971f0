"""A model written as a Hugging Face folder, whole or not at all."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.expert_adapters import adapted_experts, low_rank
from plait.models.files.finite import broken, describe
from plait.models.working_weights import adapted_layers, dtype_of, plain_state
from plait.output import write_folder


@dataclass(frozen=True)
class Export:
    """What a folder is written from."""

    skeleton: Any
    """A Transformers module of the class that is to be loaded from the folder; its weights are on the meta device."""
    state: dict[str, Tensor]
    """By the skeleton's names, on the CPU; tied names share one tensor."""
    dtype: torch.dtype
    """The dtype of the parameters in it."""
    tokenizer: Any
    """None: the folder gets none."""


class Exported(Protocol):
    """A model that can be written."""

    @property
    def dtype(self) -> torch.dtype: ...

    def export(self, dtype: torch.dtype) -> Export: ...


def save_pretrained(
    model: Exported, folder: str | Path, dtype: str | None = None, *, marker: Mapping[str, Any] | None = None
) -> None:
    """Write a Hugging Face folder: what AutoModelForCausalLM loads of a language model, what
    AutoModelForSequenceClassification loads of a scalar model. Adapters are merged into the weights.

    Safetensors, config, tokenizer and generation config go to a temporary name beside the folder, which takes its
    place (an older folder of that name included) when all is on disk.

    Args:
        dtype: of the stored weights, a key of DTYPES; None: the compute dtype.
        marker: see `output.write_folder`.

    Raises:
        ModelError: a weight is not finite; nothing is written.
        OSError: the disk is full or the place cannot be written; the old folder stays.
    """
    export = model.export(model.dtype if dtype is None else dtype_of(dtype))
    check_finite(export.state)
    write_folder(folder, lambda work: _write(export, work), marker=marker)


def check_finite(state: Mapping[str, Tensor]) -> None:
    """Weights that are to be written, of any shapes and dtypes, are numbers.

    Raises:
        ModelError: one is NaN or infinite; it names the first.
    """
    once = {id(tensor): (name, tensor) for name, tensor in reversed(state.items())}  # tied names share one
    if pieces := broken(reversed(once.values())):
        raise ModelError(f"the weights cannot be used: {describe(pieces)}")


def cpu_state(module: nn.Module, dtype: torch.dtype, adapter: str | None) -> dict[str, Tensor]:
    """A copy of a module's parameters (in `dtype`) and buffers on the CPU, each in its shape, this adapter merged into
    them."""
    adapted, experts = adapted_layers(module), adapted_experts(module)
    # A clone each: safetensors refuses tensors that share storage, and the parameters are views of one buffer.
    copies: dict[int, Tensor] = {}
    state = {}
    for name, tensor in plain_state(module).items():
        if id(tensor) not in copies:
            layer = adapted.get(name.removesuffix(".weight"))
            source, (owner, _, leaf) = tensor, name.rpartition(".")
            if adapter is not None and layer is not None and adapter in layer.lora_A:
                source = merged_weight(layer, adapter)
            elif adapter is not None and owner in experts:
                source = experts[owner].merged(leaf, adapter)
            stored = dtype if isinstance(tensor, nn.Parameter) else tensor.dtype
            copies[id(tensor)] = source.detach().to("cpu", stored, copy=True)
        state[name] = copies[id(tensor)]
    return state


@torch.no_grad()
def merged_weight(layer: Any, adapter: str | None) -> Tensor:
    """W + (alpha / rank) · B A of a layer of peft, float32 or wider: rounded only once.

    Returns:
        [out, in], or [in, out] where the layer keeps its weight so, as W has it.
    """
    weight = layer.base_layer.weight
    wide = torch.promote_types(weight.dtype, torch.float32)
    added = low_rank(layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, layer.scaling[adapter], wide)
    return weight.to(wide) + (added.t() if layer.fan_in_fan_out else added)


def _write(export: Export, folder: Path) -> None:
    with without_progress_bars():
        export.skeleton.save_pretrained(folder, state_dict=export.state)
    # Transformers states the module's dtype, not that of the tensors it was given.
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(export.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if export.tokenizer is not None:
        export.tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """The bars of Transformers would tear the live display."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
