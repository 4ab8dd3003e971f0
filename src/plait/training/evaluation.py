"""The loss over rows as they are, without an update."""

from __future__ import annotations

from collections.abc import Sequence

from plait.models.outputs import Outputs
from plait.policy.packing import MicroBatch
from plait.schedule.work import Work
from plait.training.mini_batch import MiniBatch
from plait.training.passes import forwards
from plait.training.results import counted
from plait.training.stages import ModelPart, ScoringStage
from plait.training.tally import Tally


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
    totals = tally.over(part.team, part.model.device)
    return {f"{role}/loss": totals.loss, **totals.means}
