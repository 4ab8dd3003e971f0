"""A Transformers causal LM as plait uses it: packed rows in, hidden states, logits and log-probs out.

The family's own module computes; attention goes through our registered function, and the parameters are views of one
flat buffer that a FlatLayout describes.

Shapes: T tokens of a packed row, N rows, R response tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.data.packed import PackedBatch
from plait.layout.params import FlatLayout, Param
from plait.models import attention
from plait.models.attention import AttentionContext, PackedContext
from plait.models.logprobs import chunked_logprobs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass
class LanguageModel:
    """One admitted model on one device."""

    module: Any
    """The Transformers module: attention "plait", eval mode, no dropout. Its parameters are views of `weights`."""
    tokenizer: Any
    layout: FlatLayout
    weights: Tensor
    """Flat working buffer in the compute dtype."""
    head: Callable[[Tensor], Tensor]
    """hidden [N, H] → logits [N, V], the family's scale and softcap included."""
    max_positions: int
    eos_token_ids: tuple[int, ...]

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
        """Hidden states [T, H] after the final norm, in the compute dtype."""
        out = self.module.base_model(
            input_ids=token_ids_T[None], position_ids=position_ids_T[None], use_cache=False, context=context
        )
        return out.last_hidden_state[0]

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Logits [N, V] in the compute dtype, the family's final softcap and scale included."""
        return self.head(hidden_NH)

    def logprobs(self, batch: PackedBatch, temperature: float, *, checkpoint: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [R] of the batch's response tokens under softmax(logits / temperature)."""
        hidden_TH = self.hidden(batch.token_ids_T, batch.position_ids_T, PackedContext(batch))
        return chunked_logprobs(self.head, hidden_TH[batch.predict_R], batch.targets_R, temperature)

    def load_flat(self, weights: Tensor) -> None:
        """Copy (and cast) another buffer of the same layout into the working weights."""
        assert weights.shape == self.weights.shape, f"expected {self.weights.shape}, got {weights.shape}"
        with torch.no_grad():
            self.weights.copy_(weights)


def from_module(module: Any, tokenizer: Any, dtype: str = "float32", device: str = "cpu") -> LanguageModel:
    """Take over a Transformers causal LM."""
    attention.register()
    module = module.to(device).eval()
    module.set_attn_implementation(attention.ATTENTION)
    if DTYPES[dtype] is torch.float64:
        module.set_experts_implementation("eager")  # grouped matrix products exist up to float32 only
    layout = _layout(module)
    weights = torch.zeros(layout.num_elements, dtype=DTYPES[dtype], device=device)
    for block, start, stop in layout.entries:
        param = module.get_parameter(block.param.name)
        view = weights[start:stop].view(block.shape)
        view.copy_(param.data)
        param.data = view
    eos = module.generation_config.eos_token_id if module.generation_config else module.config.eos_token_id
    eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return LanguageModel(
        module, tokenizer, layout, weights, _head(module), module.config.max_position_embeddings, eos_ids
    )


def _layout(module: nn.Module) -> FlatLayout:
    params = [Param(name, tuple(param.shape)) for name, param in module.named_parameters()]
    return FlatLayout.one_rank(params)


class _PassHidden(nn.Module):
    """Stands in for the decoder: hands the given hidden states to the family's own head."""

    def forward(self, input_ids: Any = None, *, inputs_embeds: Tensor, **_: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


def _head(module: Any) -> Callable[[Tensor], Tensor]:
    stage = copy.copy(module)
    stage._modules = {**module._modules, module.base_model_prefix: _PassHidden()}
    return lambda hidden_NH: stage(inputs_embeds=hidden_NH[None], use_cache=False).logits[0]
