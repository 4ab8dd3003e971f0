"""Read, admit and take over a causal language model: from a checkpoint's name, or a module of Transformers, to a
LanguageModel whose parameters are views of one flat buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.errors import ModelError
from plait.layout.params import FlatLayout
from plait.models.admission import causal_class, check_family, self_check
from plait.models.backbone import Backbone
from plait.models.compute import attention, cpu_linear, gated_mlp, recurrent, rms_norm, rope
from plait.models.files.pretrained import config_of, generation_of, module_of, reading, tokenizer_of
from plait.models.head import NO_HEAD, find_head
from plait.models.language_model import LanguageModel
from plait.models.shape import config_fields, usable_positions
from plait.models.working_weights import dtype_of, layout_of, move_into_flat
from plait.observe.loading import loading


def from_module(
    module: Any, tokenizer: Any, dtype: str = "float32", device: torch.device | str = "cpu", *, name: str | None = None
) -> LanguageModel:
    """Admit a Transformers causal LM and take it over: its parameters become views of a flat buffer.

    Args:
        module: on any device, in any dtype; changed in place.
        tokenizer: of Transformers, or None where no text is made.
        dtype: compute dtype, a key of DTYPES.
        name: for messages.

    Raises:
        ModelError: an admission check refuses it, or the dtype is none of DTYPES.
    """
    name = name or type(module).__name__
    check_family(type(module), module.config, name)
    model = _take_over(module, tokenizer, dtype_of(dtype), device)
    self_check(model, name)
    return model


def load_model(name: str, *, dtype: str = "bfloat16", device: torch.device | str = "cpu") -> LanguageModel:
    """Resolve, read and admit a checkpoint. Draws from no random state.

    Args:
        name: an alias, a local folder or a hub id (`models.files.hub.resolve`).
        dtype: compute dtype, a key of DTYPES; the weights are converted while they are read.

    Raises:
        ModelError: not found, no safetensors, tensors missing, or refused by an admission check.
    """
    module, tokenizer, _ = read_folder(name, dtype_of(dtype))
    return from_module(module, tokenizer, dtype, device, name=name)


def read_folder(name: str, dtype: torch.dtype, *, decoder_only: bool = False) -> tuple[Any, Any, Path]:
    """Resolve a checkpoint whose family is admitted and read it.

    Args:
        decoder_only: without the head of a causal language model.

    Returns:
        The module, its tokenizer, the folder.

    Raises:
        ModelError: see `load_model`.
    """
    from plait.models.files.hub import is_hub_id

    loading(f"model {name}, which scores" if decoder_only else f"model {name}")
    folder, _, tokenizer = read_config(name)
    with reading(name):
        module, report = module_of(folder, name, dtype, decoder_only=decoder_only)
    if faults := sorted(map(str, (*report["missing_keys"], *report["mismatched_keys"]))):
        raise ModelError(
            f"model: {name!r} lacks {len(faults)} tensors of a {type(module).__name__} or has them in another shape "
            f"({', '.join(faults[:3])}); set `model` to a complete checkpoint."
        )
    if is_hub_id(name) and not Path(name).exists():
        module.config._name_or_path = name  # what Transformers says is where it lies on this machine
    return module, tokenizer, folder


def read_config(name: str) -> tuple[Path, Any, Any]:
    """Resolve a checkpoint: its folder, the configuration of its family, which is admitted, and its tokenizer.

    Raises:
        ModelError: it cannot be found or read, or the family is refused.
    """
    from plait.models.files.hub import resolve

    folder = resolve(name)
    with reading(name):
        config = config_of(folder, name)
        check_family(causal_class(config, name), config, name)
        return folder, config, tokenizer_of(folder, name)


def read_tokens(name: str) -> tuple[Any, tuple[int, ...]]:
    """The tokenizer and the end tokens of the model that `load_model` makes of a checkpoint. Reads no weights.

    Raises:
        ModelError: see `read_config`.
    """
    folder, config, tokenizer = read_config(name)
    with reading(name):
        from transformers import GenerationConfig

        generation = generation_of(folder) or GenerationConfig.from_model_config(config)
    return tokenizer, eos_token_ids(generation, config.get_text_config(), tokenizer)


def prepare(module: Any, dtype: torch.dtype, device: torch.device | str) -> None:
    """Set a module of Transformers up for our forward: our attention, on a CPU our ways to compute its parts, too, eval
    mode. On other devices layers stay as they are: torch's compiler cannot trace what a CPU computes otherwise.

    Args:
        device: that it is to compute on, wherever its parameters are.
    """
    attention.register()
    if torch.device(device).type == "cpu":
        for replacement in (cpu_linear, rms_norm, gated_mlp, rope):
            replacement.install(module)
    recurrent.install(module)
    module.eval()
    module.set_attn_implementation(attention.ATTENTION)
    if dtype is torch.float64:
        module.set_experts_implementation("eager")  # grouped matrix products exist up to float32 only
    module.config.dtype = dtype


def _take_over(module: Any, tokenizer: Any, dtype: torch.dtype, device: torch.device | str) -> LanguageModel:
    prepare(module, dtype, device)
    layout = layout_of(module)
    return _model(module, tokenizer, layout, move_into_flat(module, layout, dtype, device))


def _model(module: Any, tokenizer: Any, layout: FlatLayout, weights: Tensor) -> LanguageModel:
    """Without weights (on the meta device) it has no head yet."""
    return LanguageModel(
        module=module,
        tokenizer=tokenizer,
        layout=layout,
        weights=weights,
        head=NO_HEAD if weights.is_meta else find_head(module),
        max_positions=max_positions(module),
        eos_token_ids=eos_token_ids(module.generation_config, module.config.get_text_config(), tokenizer),
        backbone=Backbone(module.base_model),
    )


def without_weights(module: Any, tokenizer: Any, dtype: torch.dtype, device: torch.device | str) -> LanguageModel:
    """A model over a module whose parameters are on the meta device, which is taken over: `partial.take_weights` gives
    it some.

    Args:
        device: that it is to compute on.
    """
    prepare(module, dtype, device)
    layout = layout_of(module)
    return _model(module, tokenizer, layout, torch.empty(layout.num_elements, dtype=dtype, device="meta"))


def max_positions(module: Any) -> int:
    """Longest prompt with response, in tokens."""
    return usable_positions(config_fields(module.config.get_text_config()), type(module).__name__)


def eos_token_ids(*sources: Any) -> tuple[int, ...]:
    """End tokens of generation config (chat models add theirs there), config and tokenizer, in this order."""
    ids: dict[int, None] = {}
    for source in sources:
        token_ids = getattr(source, "eos_token_id", None)
        for token_id in [token_ids] if isinstance(token_ids, int) else token_ids or []:
            ids[int(token_id)] = None
    return tuple(ids)
