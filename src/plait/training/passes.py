"""Micro-batches of one role, forward and backward, through what this rank has of the model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from plait.data.packed import PackedBatch, pack
from plait.data.rows import Rows
from plait.models.language_model import LanguageModel
from plait.models.scalar_model import ScalarModel
from plait.models.team import Team
from plait.policy.packing import MicroBatch
from plait.training.mini_batch import Outputs
from plait.training.optimizer import MasterOptimizer
from plait.training.results import Done

Loss = Callable[[MicroBatch, Outputs], Tensor]
"""The share of the loss of one micro-batch."""


class Passes:
    """Generators over the micro-batches of this rank: one action per `next()`.

    Args:
        checkpoint: recompute layer activations in the backward pass.
    """

    def __init__(self, model: LanguageModel | ScalarModel, team: Team, *, checkpoint: bool) -> None:
        self._model = model
        self._team = team
        self._checkpoint = checkpoint

    def forward(
        self,
        rows: Rows,
        micros: Sequence[MicroBatch],
        temperature: float,
        take: Callable[[MicroBatch, Outputs], None],
        *,
        name: str,
    ) -> Generator[Done, None, None]:
        """Compute without gradients; `take` gets the outputs of each micro-batch."""
        for number, micro in enumerate(micros):
            with torch.no_grad():
                take(micro, Outputs.of(self._model, self._pack(rows, micro), temperature))
            yield Done(f"{name}/mb{number}", "SCORE", micro.num_tokens)

    def train(
        self,
        rows: Rows,
        micros: Sequence[MicroBatch],
        temperature: float,
        optimizer: MasterOptimizer,
        loss: Loss,
        take: Callable[[MicroBatch, Outputs, Tensor], None],
        *,
        name: str,
    ) -> Generator[Done, None, None]:
        """Add the gradients of each micro-batch to the optimizer's; `take` gets outputs and loss."""
        for number, micro in enumerate(micros):
            packed = self._pack(rows, micro)
            with optimizer.collecting_gradients():
                outputs = Outputs.of(self._model, packed, temperature, checkpoint=self._checkpoint)
                share = loss(micro, outputs)
                share.backward()
            take(micro, outputs, share)
            yield Done(f"{name}/mb{number}", "TRAIN", micro.num_tokens)

    def _pack(self, rows: Rows, micro: MicroBatch) -> PackedBatch:
        groups = [
            (rows.samples[members[0]].prompt.token_ids, [rows.samples[i].token_ids for i in members])
            for members in micro.groups
        ]
        return pack(groups, self._model.device)
