"""A Transformers causal LM as plait uses it: packed rows in, hidden states, logits and log-probs out.

The family's own module computes. Attention goes through our registered function, the parameters are views of one flat
buffer that a FlatLayout describes, and only the rows that predict a response token reach the head.

Shapes: T tokens of a packed row, N rows, R response tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from plait.data.packed import PackedBatch
from plait.errors import ModelError
from plait.layout.params import FlatLayout
from plait.models import attention
from plait.models.admission import causal_class, check_family, self_check
from plait.models.attention import AttentionContext, PackedContext
from plait.models.head import Head, find_head
from plait.models.logprobs import chunked_logprobs
from plait.models.shape import HEAD_CHUNK_ROWS, config_fields, usable_positions
from plait.models.working_weights import layout_of, move_into_flat

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(eq=False)
class LanguageModel:
    """One admitted model on one device."""

    module: Any
    """The Transformers module: attention "plait", eval mode, no dropout. Its parameters are views of `weights`."""
    tokenizer: Any
    layout: FlatLayout
    weights: Tensor
    """Flat working buffer [layout.num_elements] in the compute dtype."""
    head: Head
    max_positions: int
    """Longest prompt with response, in tokens."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a response."""

    @property
    def config(self) -> Any:
        return self.module.config

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype

    def hidden(self, token_ids_T: Tensor, position_ids_T: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states [T, H] after the final norm, in the compute dtype; `context` says who attends to whom."""
        out = self.module.base_model(
            input_ids=token_ids_T[None], position_ids=position_ids_T[None], use_cache=False, context=context
        )
        return out.last_hidden_state[0]

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Logits [N, V] in the compute dtype, the family's final softcap and scale included."""
        return self.head(hidden_NH)

    def logprobs(
        self, batch: PackedBatch, temperature: float, *, checkpoint: bool = False, chunk_rows: int = HEAD_CHUNK_ROWS
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the batch's response tokens under softmax(logits / temperature).

        Args:
            batch: on the model's device.
            temperature: of the sampling; positive.
            checkpoint: keep one activation per decoder layer and compute the layer again in the backward.
            chunk_rows: rows that pass the head at a time.

        Returns:
            (log-probs [R], entropies [R]) in float32, float64 for a float64 model; once differentiable.
        """
        with self._checkpointed() if checkpoint and torch.is_grad_enabled() else contextlib.nullcontext():
            hidden_TH = self.hidden(batch.token_ids_T, batch.position_ids_T, PackedContext(batch))
        return chunked_logprobs(self.head, hidden_TH[batch.predict_R], batch.targets_R, temperature, chunk_rows)

    def load_flat(self, weights: Tensor) -> None:
        """Copy another buffer of the same layout (any dtype or device) into the working weights."""
        assert weights.shape == self.weights.shape, f"expected {self.weights.shape}, got {weights.shape}"
        with torch.no_grad():
            self.weights.copy_(weights)

    @contextlib.contextmanager
    def _checkpointed(self) -> Iterator[None]:
        layers = _decoder_layers(self.module)
        for layer in layers:
            layer.forward = partial(recompute, layer.forward, use_reentrant=False, preserve_rng_state=False)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward


def _decoder_layers(module: nn.Module) -> list[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    assert layers, f"{type(module).__name__} marks no decoder layers"
    return layers


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
    model = _take_over(module, tokenizer, _dtype(dtype), device)
    self_check(model, name)
    return model


def load_model(name: str, *, dtype: str = "bfloat16", device: torch.device | str = "cpu") -> LanguageModel:
    """Resolve, read and admit a checkpoint. Draws from no random state.

    Args:
        name: an alias, a local folder or a hub id (`models.hub.resolve`).
        dtype: compute dtype, a key of DTYPES; the weights are converted while they are read.

    Raises:
        ModelError: not found, no safetensors, tensors missing, or refused by an admission check.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from plait.models.hub import resolve

    torch_dtype = _dtype(dtype)
    folder = resolve(name)
    with torch.random.fork_rng(devices=[]), _without_progress_bars():
        try:
            config = AutoConfig.from_pretrained(folder)
            check_family(causal_class(config, name), config, name)
            module, report = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch_dtype, use_safetensors=True, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, KeyError, ImportError, ValueError, RuntimeError, StrictDataclassError) as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"model: {name!r} cannot be read as a causal language model: {error}") from error
    if faults := sorted(map(str, (*report["missing_keys"], *report["mismatched_keys"]))):
        raise ModelError(
            f"model: {name!r} lacks {len(faults)} tensors of a {type(module).__name__} or has them in another shape "
            f"({', '.join(faults[:3])}); set `model` to a complete checkpoint."
        )
    return from_module(module, tokenizer, dtype, device, name=name)


def save_pretrained(model: LanguageModel, folder: str | Path, dtype: str | None = None) -> None:
    """Write a Hugging Face folder that AutoModelForCausalLM.from_pretrained loads.

    Safetensors, config, tokenizer and generation config go to a temporary name beside the folder, which takes its
    place (an older folder of that name included) when all is on disk.

    Args:
        dtype: of the stored weights, a key of DTYPES; None: the compute dtype.

    Raises:
        OSError: the disk is full or the place cannot be written; the old folder stays.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = folder.with_name(f".{folder.name}.tmp")
    old = folder.with_name(f".{folder.name}.old")
    for leftover in (work, old):
        if leftover.exists():
            shutil.rmtree(leftover)
    try:
        _write_folder(model, work, model.dtype if dtype is None else _dtype(dtype))
    except BaseException:  # a full disk comes out of safetensors as an error of its own
        shutil.rmtree(work, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(old)
    work.rename(folder)
    _sync(folder.parent)
    if old.exists():
        shutil.rmtree(old)


def _write_folder(model: LanguageModel, folder: Path, dtype: torch.dtype) -> None:
    # A clone each: safetensors refuses tensors that share storage, and the parameters are views of one buffer.
    copies: dict[int, Tensor] = {}
    state = {}
    for name, tensor in model.module.state_dict(keep_vars=True).items():
        if id(tensor) not in copies:
            is_param = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = tensor.detach().to("cpu", dtype if is_param else tensor.dtype, copy=True)
        state[name] = copies[id(tensor)]
    with _without_progress_bars():
        model.module.save_pretrained(folder, state_dict=state)
    model.module.config.dtype = model.dtype  # saving leaves its name there
    # Transformers states the module's dtype, not that of the tensors it was given.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}, indent=2))
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """The bars of Transformers would tear the live display."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_of(model: LanguageModel) -> LanguageModel:
    """A frozen copy with a buffer of its own: the reference. None of its parameters requires a gradient."""
    twin = _take_over(copy.deepcopy(model.module), model.tokenizer, model.dtype, model.device)
    twin.module.requires_grad_(False)
    return twin


def _take_over(module: Any, tokenizer: Any, dtype: torch.dtype, device: torch.device | str) -> LanguageModel:
    attention.register()
    module.eval()
    module.set_attn_implementation(attention.ATTENTION)
    if dtype is torch.float64:
        module.set_experts_implementation("eager")  # grouped matrix products exist up to float32 only
    module.config.dtype = dtype
    layout = layout_of(module)
    weights = move_into_flat(module, layout, dtype, device)
    return LanguageModel(
        module=module,
        tokenizer=tokenizer,
        layout=layout,
        weights=weights,
        head=find_head(module),
        max_positions=usable_positions(config_fields(module.config.get_text_config()), type(module).__name__),
        eos_token_ids=_eos_token_ids(module, tokenizer),
    )


def _dtype(dtype: str) -> torch.dtype:
    if dtype not in DTYPES:
        raise ModelError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


def _eos_token_ids(module: Any, tokenizer: Any) -> tuple[int, ...]:
    """Of the generation config (chat models add theirs there), the config and the tokenizer, in this order."""
    sources = (module.generation_config, module.config.get_text_config(), tokenizer)
    ids: dict[int, None] = {}
    for source in sources:
        found = getattr(source, "eos_token_id", None)
        for token_id in [found] if isinstance(found, int) else found or []:
            ids[int(token_id)] = None
    return tuple(ids)
