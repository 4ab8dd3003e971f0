"""A Transformers causal LM as plait uses it: packed rows in, hidden states, logits and log-probs out.

The family's own module computes. Attention goes through our registered function, the parameters are views of one flat
buffer that a FlatLayout describes, and only the rows that predict a response token reach the head.

Shapes: T tokens of a packed row, N rows, R response tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.data.packed import PackedBatch
from plait.errors import ModelError
from plait.layout.params import FlatLayout
from plait.models.admission import causal_class, check_family, self_check
from plait.models.backbone import Backbone, BackboneModel
from plait.models.backbone import copy_of as copy_of
from plait.models.compute import attention, cpu_linear, gated_mlp, rms_norm, rope
from plait.models.compute.float64 import kept_float64
from plait.models.compute.logprobs import chunked_logprobs
from plait.models.files.pretrained import config_of, module_of, tokenizer_of
from plait.models.files.saving import Export, cpu_state, without_progress_bars
from plait.models.files.saving import save_pretrained as save_pretrained
from plait.models.head import NO_HEAD, Head, find_head
from plait.models.parallel.part import Part
from plait.models.shape import HEAD_CHUNK_ROWS, config_fields, usable_positions
from plait.models.working_weights import (
    OwnPart,
    copy_module,
    dtype_of,
    layout_of,
    move_into_flat,
    skeleton,
)
from plait.observe.loading import loading


@dataclass(eq=False)
class LanguageModel(BackboneModel):
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
    backbone: Backbone
    """The module's decoder, perhaps shared with other models."""
    own: OwnPart | None = None
    """Its adapter where it is a view of shared weights (`models.lora`)."""
    part: Part | None = None
    """Its place in a team (`models.partial`); None: it is whole, and alone."""

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Logits [N, V] in the compute dtype, the family's final softcap and scale included.

        Of the last pipeline stage alone: the others have no head, and get None.
        """
        if not self.team.is_last_stage:
            return None  # type: ignore[return-value]
        return self.head(hidden_NH)

    def eager_logits(self, token_ids_1T: Tensor) -> Tensor:
        """Logits [T, V] of one sample by the family's own forward, with the attention that the module is set to."""
        with kept_float64(self.dtype):
            return self.module(input_ids=token_ids_1T, use_cache=False).logits[0]

    def logprobs(
        self,
        batch: PackedBatch,
        temperature: float,
        *,
        checkpoint: bool = False,
        chunk_rows: int = HEAD_CHUNK_ROWS,
        likeliest_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the batch's response tokens under softmax(logits / temperature).

        Through all stages, where there are several: without gradients then.

        Args:
            batch: on the model's device.
            temperature: of the sampling; positive.
            checkpoint: keep one activation per decoder layer and compute the layer again in the backward.
            chunk_rows: rows that pass the head at a time.
            likeliest_R: bool, is filled on the last stage: whether no token is likelier than the target.

        Returns:
            (log-probs [R], entropies [R]) in float32, float64 for a float64 model; once differentiable.
        """
        num_rows = len(batch.predict_R)
        return self._outputs(
            batch,
            lambda hidden_TH: self.logprobs_of(hidden_TH, batch, temperature, chunk_rows, likeliest_R=likeliest_R),
            (num_rows, num_rows),
            checkpoint=checkpoint,
        )

    def logprobs_of(
        self,
        hidden_TH: Tensor,
        batch: PackedBatch,
        temperature: float,
        chunk_rows: int = HEAD_CHUNK_ROWS,
        *,
        likeliest_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`logprobs` from the hidden states of the last stage (`stage`)."""
        hidden_RH, targets_R = hidden_TH[batch.predict_R], batch.targets_R
        return chunked_logprobs(self.head, hidden_RH, targets_R, temperature, chunk_rows, likeliest_R=likeliest_R)

    def read_places(self, batch: PackedBatch) -> Tensor:
        """See `BackboneModel.read_places`."""
        return batch.predict_R

    def export(self, dtype: torch.dtype) -> Export:
        """What `saving.save_pretrained` writes. Of a whole model: a part's weights are moved to one first."""
        assert self.part is None or self.part.is_whole, "a part of a model cannot be exported"
        adapter = None if self.own is None else self.own.adapter
        state = cpu_state(self.module, dtype, adapter)
        return Export(skeleton(self.module, self.layout), state, dtype, self.tokenizer)

    def copied(self) -> LanguageModel:
        """See `backbone.copy_of`."""
        if self.own is not None:
            return self.own.copied()
        return self._over(*copy_module(self.module, self.layout))

    def _over(self, module: Any, weights: Tensor) -> LanguageModel:
        head = find_head(module, self.head.vocabulary) if self.team.is_last_stage else NO_HEAD
        return replace(self, module=module, weights=weights, head=head, backbone=Backbone(module.base_model))


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
        name: an alias, a local folder or a hub id (`models.hub.resolve`).
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
    loading(f"model {name}")
    folder, _, tokenizer = read_config(name)
    with _reading(name):
        module, report = module_of(folder, name, dtype, decoder_only=decoder_only)
    if faults := sorted(map(str, (*report["missing_keys"], *report["mismatched_keys"]))):
        raise ModelError(
            f"model: {name!r} lacks {len(faults)} tensors of a {type(module).__name__} or has them in another shape "
            f"({', '.join(faults[:3])}); set `model` to a complete checkpoint."
        )
    return module, tokenizer, folder


def read_config(name: str) -> tuple[Path, Any, Any]:
    """Resolve a checkpoint: its folder, the configuration of its family, which is admitted, and its tokenizer.

    Raises:
        ModelError: it cannot be found or read, or the family is refused.
    """
    from plait.models.files.hub import resolve

    folder = resolve(name)
    with _reading(name):
        config = config_of(folder, name)
        check_family(causal_class(config, name), config, name)
        return folder, config, tokenizer_of(folder, name)


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """What Transformers raises becomes a ModelError; no random state is moved, no bar is shown."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    with torch.random.fork_rng(devices=[]), without_progress_bars():
        try:
            yield
        except (
            OSError,
            KeyError,
            ImportError,
            ValueError,
            RuntimeError,
            SafetensorError,
            StrictDataclassError,
        ) as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"model: {name!r} cannot be read as a causal language model: {error}") from error


def prepare(module: Any, dtype: torch.dtype) -> None:
    """Set a module of Transformers up for our forward: our attention and our ways to compute its parts, eval mode."""
    attention.register()
    cpu_linear.install(module)
    rms_norm.install(module)
    gated_mlp.install(module)
    rope.install(module)
    module.eval()
    module.set_attn_implementation(attention.ATTENTION)
    if dtype is torch.float64:
        module.set_experts_implementation("eager")  # grouped matrix products exist up to float32 only
    module.config.dtype = dtype


def _take_over(module: Any, tokenizer: Any, dtype: torch.dtype, device: torch.device | str) -> LanguageModel:
    prepare(module, dtype)
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


def without_weights(module: Any, tokenizer: Any, dtype: torch.dtype) -> LanguageModel:
    """A model over a module whose parameters are on the meta device, which is taken over: `partial.take_weights` gives
    it some."""
    prepare(module, dtype)
    layout = layout_of(module)
    return _model(module, tokenizer, layout, torch.empty(layout.num_elements, dtype=dtype, device="meta"))


def max_positions(module: Any) -> int:
    """Longest prompt with response, in tokens."""
    return usable_positions(config_fields(module.config.get_text_config()), type(module).__name__)


def eos_token_ids(*sources: Any) -> tuple[int, ...]:
    """Of the generation config (chat models add theirs there), the config and the tokenizer, in this order."""
    ids: dict[int, None] = {}
    for source in sources:
        found = getattr(source, "eos_token_id", None)
        for token_id in [found] if isinstance(found, int) else found or []:
            ids[int(token_id)] = None
    return tuple(ids)
