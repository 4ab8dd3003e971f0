"""A Transformers causal LM as plait uses it: packed rows in, hidden states, logits and log-probs out.

The family's own module computes. Attention goes through our registered function, the parameters are views of one flat
buffer that a FlatLayout describes, and only the rows that predict a response token reach the head.

Shapes: T tokens of a packed row, N rows, R response tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from plait.data.packed import PackedBatch
from plait.models.backbone import Backbone
from plait.models.backbone_model import BackboneModel
from plait.models.compute.float64 import kept_float64
from plait.models.compute.logprobs import chunked_logprobs
from plait.models.compute.logprobs_at import chunked_logprobs_at
from plait.models.files.saving import Export, cpu_state
from plait.models.head import NO_HEAD, Head, find_head, head_of_part
from plait.models.logits_room import kept_logits_bytes
from plait.models.outputs import Outputs, Said
from plait.models.working_weights import OwnPart, adapter_name, skeleton


@dataclass(eq=False, kw_only=True)
class LanguageModel(BackboneModel):
    """See the top of the file."""

    kind: ClassVar[str] = "a language model"
    says: ClassVar[tuple[Said, ...]] = (Said.LOGPROBS, Said.ENTROPIES, Said.TOP_LOGPROBS)
    peft_task: ClassVar[str] = "CAUSAL_LM"

    head: Head
    """`NO_HEAD` on pipeline stages before the last, and before there are weights."""

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Logits [N, V] in the compute dtype, the family's final softcap and scale included; of the last pipeline stage
        alone, as the others have no head."""
        return self.head(hidden_NH)

    def eager_logits(self, token_ids_1T: Tensor) -> Tensor:
        """Logits [T, V] of one sample by the family's own forward, with the attention that the module is set to."""
        with kept_float64(self.dtype):
            return self.module(input_ids=token_ids_1T, use_cache=False).logits[0]

    def logprobs(
        self, batch: PackedBatch, temperature: float, *, checkpoint: bool = False, chunk_rows: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """`logprobs_of` a batch on the model's device, by a model in one stage: log-probs [R] and entropies [R]. For
        `checkpoint` see `hidden`."""
        return self.logprobs_of(self.stage(batch, checkpoint=checkpoint), batch, temperature, chunk_rows)

    def logprobs_of(
        self,
        hidden_TH: Tensor,
        batch: PackedBatch,
        temperature: float,
        chunk_rows: int | None = None,
        *,
        likeliest_R: Tensor | None = None,
        keeps_logits: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the batch's response tokens under softmax(logits / temperature), from the hidden
        states of the last stage (`stage`). Where the batch says what its tokens were drawn from, over that alone.

        Args:
            temperature: of the sampling; positive.
            chunk_rows: rows that pass the head at a time; None: `logits_room.head_chunk_rows`.
            likeliest_R: bool, is filled: whether no token is likelier than the target.
            keeps_logits: whether a backward finds logits again, as far as `logits_room.kept_logits_bytes` go.

        Returns:
            (log-probs [R], entropies [R]) in float32, float64 for a float64 model; once differentiable.
        """
        hidden_RH, targets_R = hidden_TH[batch.predict_R], batch.targets_R
        kept = kept_logits_bytes(hidden_TH.device.type) if keeps_logits else 0
        given = self.head, hidden_RH, targets_R, temperature, chunk_rows
        return chunked_logprobs(*given, likeliest_R=likeliest_R, kept_bytes=kept, supports=batch.supports)

    def outputs(
        self, hidden_TH: Tensor, batch: PackedBatch, temperature: float, *, keeps_logits: bool = False
    ) -> Outputs:
        """`logprobs_of` the hidden states of the last stage, and which targets are likeliest, each [R]."""
        likeliest_R = torch.empty_like(batch.targets_R, dtype=torch.bool)
        at = lambda ids_RK: chunked_logprobs_at(self.head, hidden_TH[batch.predict_R], ids_RK, temperature)
        numbers = self.logprobs_of(hidden_TH, batch, temperature, likeliest_R=likeliest_R, keeps_logits=keeps_logits)
        return Outputs(*numbers, likeliest_R, logprobs_at=at)

    def head_outputs(self, hidden_TH: Tensor, batch: PackedBatch) -> Tensor:
        """What the head makes of hidden states [T, H], one row for each place that it reads: logits [T, V]."""
        return self.logits(hidden_TH)

    def renew_head(self) -> None:
        """Read the head of the module anew, whose parameters are this rank's now."""
        self.head = head_of_part(self.module, self.parameters, self.team)

    def parameters_of_views(self) -> dict[str, nn.Parameter]:
        """Parameters that every view with an adapter has of its own, by name: none."""
        return {}

    def with_own(self, own: OwnPart) -> LanguageModel:
        """A view of this model with parameters of its own (an adapter)."""
        return replace(self, own=own)

    def read_places(self, batch: PackedBatch) -> Tensor:
        """See `BackboneModel.read_places`: [R]."""
        return batch.predict_on_host_R

    def export(self, dtype: torch.dtype) -> Export:
        """What `saving.save_pretrained` writes. Of a whole model: a part's weights are moved to one first."""
        assert self.part is None or self.part.is_whole, "a part of a model cannot be exported"
        state = cpu_state(self.module, dtype, adapter_name(self.own))
        return Export(skeleton(self.module, self.layout), state, dtype, self.tokenizer)

    def _over(self, module: Any, weights: Tensor) -> LanguageModel:
        head = find_head(module, self.head.vocabulary) if self.team.is_last_stage else NO_HEAD
        return replace(self, module=module, weights=weights, head=head, backbone=Backbone(module.base_model))
