"""The Transformers module as a backend: it serves every model that is admitted, on every device, in every dtype."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor

from plait.generation.captured import CapturedSteps
from plait.generation.fused_layers import FusedLayers
from plait.generation.kept_experts import NotedExperts
from plait.generation.paged import attention_for
from plait.generation.pool import KVPool
from plait.generation.ragged import RaggedBatch
from plait.generation.ragged_context import RaggedContext
from plait.kernels import device_attention
from plait.models.compute.attention import AttentionContext
from plait.models.compute.cpu_linear import PackedLinears
from plait.models.compute.recurrent import recurrent_layers_of
from plait.models.expert_adapters import adapted_experts
from plait.models.language_model import LanguageModel
from plait.policy.blocks import BLOCK_TOKENS


class ModuleForward:
    """A Backend, see there. Prepared, its products on a CPU read weights that are packed once more."""

    devices: ClassVar[frozenset[str]] = frozenset(("cpu", "cuda"))
    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset((torch.float64, torch.float32, torch.bfloat16))
    by_rank: ClassVar[bool] = True
    is_steady = False
    """Libraries choose kernels by the number of rows."""

    def __init__(self, model: LanguageModel, block_tokens: int, *, notes_experts: bool) -> None:
        """notes_experts: pools of its steps are told which experts tokens go to"""
        self.model, self._is_last = model, model.team.is_last_stage
        self._attention = attention_for(model.device, model.dtype, block_tokens)
        self._packed = PackedLinears(model.module)
        own = () if model.own is None else model.own.parameters.values()  # those of experts are not in the module
        storages = {param.untyped_storage()._cdata: param for param in (*model.module.parameters(), *own)}
        self._weights = tuple(storages.values())
        """One parameter of each storage: weights are views of a few, in which they keep their places."""
        self.takes_chunks = self._attention is device_attention.paged_attention
        """Whether attention over blocks computes chunks of prompts as well, and asks the device for nothing."""
        self.layers = FusedLayers(model.module)
        ways = {"by fused layers": self.fused, "by plain layers": self.plainly}
        if notes_experts or adapted_experts(model.module):  # routers, and products of experts, are heard in Python
            del ways["by fused layers"]
        captures = model.device.type == "cuda" and self.takes_chunks and not recurrent_layers_of(model.config)
        self.captured = CapturedSteps(ways, self.readout, self.addresses, peers=model.team.tp) if captures else None
        """The steps that are replayed in place of `plainly`; None: on a CPU, and in float64, whose attention asks the
        device for numbers; where layers are recurrent, for which a step finds slots as it begins."""

    @classmethod
    def of(cls, model: LanguageModel, block_tokens: int = BLOCK_TOKENS) -> Self:
        """See Backend.of: never refused, as the module is what others are held against."""
        return cls(model, block_tokens, notes_experts=False)

    @property
    def is_prepared(self) -> bool:
        """See Backend.is_prepared."""
        return self._packed.is_packed

    def prepare(self) -> None:
        """See Backend.prepare."""
        self._packed.pack()

    def compute(self, batch: RaggedBatch, pool: KVPool) -> Tensor | None:
        """See `Backend.compute`: [R, V] or [T, H], which the next step that is replayed overwrites."""
        return (self.plainly if self.captured is None else self.captured.compute)(batch, pool)

    def plainly(self, batch: RaggedBatch, pool: KVPool) -> Tensor | None:
        """What this stage makes of a step, each operation by itself: logits [R, V], on a stage that is not the last
        hidden states [T, H]."""
        routing = NotedExperts(pool, batch.places_T) if pool.keeps_experts else None
        return self._computed(batch, self._context(batch, pool), routing=routing)

    def fused(self, batch: RaggedBatch, pool: KVPool) -> Tensor | None:
        """As `plainly`, by layers that torch has compiled: [R, V] or [T, H].

        Raises:
            RuntimeError: it cannot compile them.
            ModelError: the family does not say which modules they are.
        """
        with self.layers.applied(self._context(batch, pool)) as context:
            return self._computed(batch, context, leaves_out=False)

    def _context(self, batch: RaggedBatch, pool: KVPool) -> RaggedContext:
        return RaggedContext(pool, batch, self._attention, takes_chunks=self.takes_chunks)

    def _computed(
        self,
        batch: RaggedBatch,
        context: AttentionContext,
        *,
        leaves_out: bool = True,
        routing: NotedExperts | None = None,
    ) -> Tensor | None:
        """
        Args:
            leaves_out: what the last layer would compute of rows that are not read. It then computes in a way of this
                step alone, which torch would compile anew in each.
        """
        read_R = batch.read_R if leaves_out else None
        with self._packed.applied():
            hidden_TH = self.model.hidden(
                batch.token_ids_T,
                batch.position_ids_T,
                context,
                inputs_TH=batch.inputs_TH,
                read=read_R,
                routing=routing,
            )
            return self.readout(hidden_TH, batch) if batch.has_head else hidden_TH

    def readout(self, hidden_TH: Tensor, batch: RaggedBatch) -> Tensor | None:
        """What this stage makes of the hidden states [T, H] behind its layers."""
        if not self._is_last:
            return hidden_TH
        hidden_RH = hidden_TH if batch.read_R is None else hidden_TH[batch.read_R]
        return self.model.logits(hidden_RH) if len(hidden_RH) else None

    def addresses(self) -> tuple[int, ...]:
        """Where the weights lie that a step reads. It is asked in each step, and a walk over all parameters would take
        as long as a small model's layers do."""
        return tuple(param.data_ptr() for param in self._weights)

    def drop(self, *, keep_memory: bool = False) -> None:
        """See Backend.drop."""
        if self.captured is not None:
            self.captured.look() if keep_memory else self.captured.drop()
        self._packed.drop()
