"""Passes over the micro-batches of this rank: forwards alone, the loss over rows as they are, or forwards and backwards
of an open mini-batch.

If the model is split into stages they run by a pipeline schedule, otherwise one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.models.outputs import Outputs
from plait.policy.packing import MicroBatch
from plait.schedule.pipeline import Pipeline, Workload
from plait.schedule.validate import validate
from plait.schedule.work import Done, Work
from plait.training.mini_batch import MiniBatch
from plait.training.pipeline import Stage, execute, forwards_only, pipeline_of
from plait.training.results import counted
from plait.training.stages import ModelPart, ScoringStage, TrainingStage
from plait.training.tally import Tally
from plait.training.trainer_settings import Rule


@dataclass(frozen=True)
class OpenMiniBatch:
    """A mini-batch between `BegunTraining.open` and `close`, on one rank.

    Either `run` does the forwards and backwards of its micro-batches, or a schedule of several models does: the
    `pipeline` of each in one `Workload`, and `pipeline.execute` with the `stage` of each under its `key`. Any schedule
    that passes `schedule.validate` gives the same bits: it keeps the order of a model's forwards, and of its backwards.
    """

    role: str
    copies: tuple[tuple[MicroBatch, ...], ...]
    """The micro-batches of every dp rank: every rank knows the whole schedule. Where gradients are summed in each, all
    ranks have as many, some without samples: the order of a pipeline follows from their number, so all copies meet in
    one order, in which none waits for another in a circle."""
    stage: TrainingStage
    tallies: tuple[Tally | None, ...]
    """What counts the mini-batch of each loss; None: it has none any more."""
    names: tuple[str, ...]
    """What the ids of the actions of each micro-batch of this rank begin with."""
    name: str
    """What stands for all of it in messages, and the id of its optimizer step begins with."""

    @property
    def key(self) -> tuple[str, int]:
        """The model and the copy of it that this rank computes, as schedules name them."""
        return self.role, self.stage.part.team.dp.index

    def pipeline(self, copy: int, ranks: Sequence[int]) -> Pipeline:
        """A copy of the model as a pipeline of a schedule.

        Args:
            ranks: the row of the schedule of each of its stages, in order.
        """
        return pipeline_of(self.role, copy, ranks, self.copies[copy])

    def run(self, rule: Rule) -> Work[None]:
        """Do all forwards and backwards, for a role that trains by itself: one action per `next()`."""
        if self.stage.part.team.pp.size > 1:
            return _pipelined(self.stage, self.key, self.stage.micros, rule, self.name, self.names)
        return self._one_by_one()

    def _one_by_one(self) -> Work[None]:
        for number, (name, micro) in enumerate(zip(self.names, self.stage.micros, strict=True)):
            self.stage.forward(number, None)
            self.stage.backward(number, None)
            if micro.samples:
                yield Done(f"{name}/mb{number}", "TRAIN", micro.num_tokens)


def forwards(stage: ScoringStage, role: str, name: str) -> Work[None]:
    """Compute forwards without gradients: one action per `next()`, whose id begins with `name`."""
    team = stage.part.team
    if team.pp.size > 1:
        yield from _pipelined(stage, (role, team.dp.index), stage.micros, forwards_only, name)
        return
    for number, micro in enumerate(stage.micros):
        stage.forward(number, None)
        if micro.samples:
            yield Done(f"{name}/mb{number}", "SCORE", micro.num_tokens)


def _pipelined(
    stage: ScoringStage | TrainingStage,
    key: tuple[str, int],
    micros: Sequence[MicroBatch],
    rule: Rule,
    name: str,
    names: Sequence[str] | None = None,
) -> Work[None]:
    if not micros:
        return
    peers = stage.part.team.pp
    workload = Workload((pipeline_of(*key, range(peers.size), micros),), peers.size)
    schedule = rule(workload)
    if rule is not forwards_only:
        validate(schedule, workload)
    stages: dict[tuple[str, int], Stage] = {key: stage}
    of_models = {} if names is None else {key[0]: names}
    yield from execute(schedule, stages, peers, name=name, names=of_models, in_order=peers.in_order)


def loss_over(
    part: ModelPart, batch: MiniBatch, micros: Sequence[MicroBatch], role: str, name: str
) -> Work[dict[str, float]]:
    """Forward over one mini-batch, one micro-batch per `next()`.

    Args:
        micros: of this dp rank.
        name: prefix of the action ids.

    Returns:
        `{role}/loss`, `{role}/entropy` and what the loss logs, as one step of `Trainer.train` would say them.

    Raises:
        RunError: the loss returns what is not a loss.
    """
    tally = Tally(batch)

    def take(micro: MicroBatch, outputs: Outputs) -> None:
        tally.add(micro, outputs, batch.share(micro, outputs, needs_gradient=False))

    stage = ScoringStage(part, batch.rows, micros, batch.temperature, take)
    yield from counted(forwards(stage, role, name), part.team)
    part.layers.rest()
    totals = tally.over(part.team, part.model.device)
    return {f"{role}/loss": totals.loss, **totals.means}
