"""Micro-batches of one role, forward and backward, through what this rank has of the model.

Shapes: T tokens of a packed row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.data.packed import PackedBatch, pack
from plait.data.rows import Rows
from plait.models.language_model import LanguageModel
from plait.models.parallel.team import Team
from plait.models.scalar_model import ScalarModel
from plait.policy.packing import MicroBatch
from plait.schedule.generators import one_f_one_b
from plait.schedule.pipeline import Workload
from plait.schedule.schedule import Schedule
from plait.schedule.validate import validate
from plait.schedule.work import Done, Work
from plait.training.mini_batch import Outputs
from plait.training.optimizer import MasterOptimizer
from plait.training.pipeline import execute, forwards_only, workload_of

Model = LanguageModel | ScalarModel
Rule = Callable[[Workload], Schedule]
"""Makes the pipeline schedule of a mini-batch."""
Take = Callable[[MicroBatch, Outputs], None]
"""Is given what the model said of a micro-batch."""
Loss = Callable[[MicroBatch, Outputs], Tensor]
"""The share of the loss of a micro-batch."""
TakeLoss = Callable[[MicroBatch, Outputs, Tensor], None]
"""Is given what the model said of a micro-batch, and its share of the loss."""


class Passes:
    """Generators over the micro-batches of this rank: one action per `next()`.

    Where the model is cut into stages only the last one has outputs, so what is given to `take` is there alone.

    Args:
        role: name of the pipeline in its schedules.
        checkpoint: recompute layer activations in the backward pass.
        rule: of the schedules that train; the ranks of a workload are the stages.
    """

    def __init__(self, model: Model, team: Team, *, role: str, checkpoint: bool, rule: Rule = one_f_one_b) -> None:
        self._model = model
        self._team = team
        self._role = role
        self._checkpoint = checkpoint
        self._rule = rule

    def forward(
        self, rows: Rows, micros: Sequence[MicroBatch], temperature: float, take: Take, *, name: str
    ) -> Work[None]:
        """Compute without gradients."""
        if self._team.pp.size > 1:
            stage = _ScoringStage(self._model, self._team, rows, micros, temperature, take)
            yield from self._pipelined(stage, micros, forwards_only, name)
            return
        for number, micro in enumerate(micros):
            with torch.no_grad():
                take(micro, Outputs.of(self._model, packed(self._model, rows, micro), temperature))
            yield Done(f"{name}/mb{number}", "SCORE", micro.num_tokens)

    def train(
        self,
        rows: Rows,
        micros: Sequence[MicroBatch],
        temperature: float,
        optimizer: MasterOptimizer,
        loss: Loss,
        take: TakeLoss,
        *,
        name: str,
    ) -> Work[None]:
        """Add the gradients of each micro-batch to those of the optimizer."""
        if self._team.pp.size > 1:
            stage = _TrainingStage(
                self._model, self._team, rows, micros, temperature, take, loss, optimizer, self._checkpoint
            )
            yield from self._pipelined(stage, micros, self._rule, name)
            return
        for number, micro in enumerate(micros):
            batch = packed(self._model, rows, micro)
            with optimizer.collecting_gradients():
                outputs = Outputs.of(self._model, batch, temperature, checkpoint=self._checkpoint)
                share = loss(micro, outputs)
                share.backward()
            take(micro, outputs, share)
            yield Done(f"{name}/mb{number}", "TRAIN", micro.num_tokens)

    def _pipelined(
        self, stage: _ScoringStage | _TrainingStage, micros: Sequence[MicroBatch], rule: Rule, name: str
    ) -> Work[None]:
        if not micros:
            return
        copy = self._team.dp.index
        workload = workload_of(self._role, copy, self._team.pp.size, micros)
        schedule = rule(workload)
        if rule is not forwards_only:
            validate(schedule, workload)
        in_order = self._model.device.type == "cuda"  # on NCCL, which has no tags
        yield from execute(schedule, {(self._role, copy): stage}, self._team.pp, name=name, in_order=in_order)


@dataclass
class _ScoringStage:
    """Forward only."""

    model: Model
    team: Team
    rows: Rows
    micros: Sequence[MicroBatch]
    temperature: float
    take: Take

    def tokens(self, index: int) -> int:
        return self.micros[index].num_tokens

    def room(self, index: int) -> Tensor:
        return message_room(self.model, self.tokens(index))

    def forward(self, index: int, inputs: Tensor | None) -> Tensor | None:
        micro = self.micros[index]
        batch = packed(self.model, self.rows, micro)
        with torch.no_grad():
            hidden_TH = self.model.stage(batch, inputs)
            if not self.team.is_last_stage:
                return hidden_TH
            self.take(micro, Outputs.of_hidden(self.model, batch, hidden_TH, self.temperature))
        return None

    def backward(self, index: int, gradient: Tensor | None) -> Tensor | None:
        raise AssertionError("a call that scores has no backward")


@dataclass
class _TrainingStage:
    """Forward and backward, which other micro-batches' come between."""

    model: Model
    team: Team
    rows: Rows
    micros: Sequence[MicroBatch]
    temperature: float
    take: TakeLoss
    loss: Loss
    optimizer: MasterOptimizer
    checkpoint: bool
    kept: dict[int, tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    """Of each micro-batch in flight what came in, and what the backward starts from."""

    def tokens(self, index: int) -> int:
        return self.micros[index].num_tokens

    def room(self, index: int) -> Tensor:
        return message_room(self.model, self.tokens(index))

    def forward(self, index: int, inputs: Tensor | None) -> Tensor | None:
        micro = self.micros[index]
        batch = packed(self.model, self.rows, micro)
        with self.optimizer.collecting_gradients():
            if inputs is not None:
                inputs.requires_grad_(True)
            hidden_TH = self.model.stage(batch, inputs, checkpoint=self.checkpoint)
            if not self.team.is_last_stage:
                self.kept[index] = inputs, hidden_TH
                return hidden_TH.detach()
            outputs = Outputs.of_hidden(self.model, batch, hidden_TH, self.temperature)
            share = self.loss(micro, outputs)
        self.take(micro, outputs, share)
        self.kept[index] = inputs, share
        return None

    def backward(self, index: int, gradient: Tensor | None) -> Tensor | None:
        inputs, start = self.kept.pop(index)
        with self.optimizer.collecting_gradients():
            torch.autograd.backward(start, gradient)
        return None if inputs is None else inputs.grad


def packed(model: Model, rows: Rows, micro: MicroBatch) -> PackedBatch:
    """The packed row of a micro-batch, on the model's device."""
    groups = [
        (rows.samples[members[0]].prompt.token_ids, [rows.samples[i].token_ids for i in members])
        for members in micro.groups
    ]
    return pack(groups, model.device)


def message_room(model: Model, num_tokens: int) -> Tensor:
    """Memory for hidden states [T, H] between two stages, or for their gradient."""
    hidden_size = model.config.get_text_config().hidden_size
    return torch.empty(num_tokens, hidden_size, dtype=model.dtype, device=model.device)
