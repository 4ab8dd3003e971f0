"""The order of a pipeline's actions that a plan states, made a rule for as many micro-batches as a mini-batch has."""

from __future__ import annotations

from dataclasses import dataclass

from plait.errors import DataError
from plait.schedule.action import Kind
from plait.schedule.generators import in_flight
from plait.schedule.pipeline import Pipeline, Workload, schedule_of
from plait.schedule.schedule import Schedule, natural_waits
from plait.schedule.validate import validate

Word = tuple[Kind, int]
"""Forward or backward of a micro-batch, on a stage that is understood."""


@dataclass(frozen=True, slots=True)
class StatedOrder:
    """What each stage does with `num_micro_batches` micro-batches: a `training_order.TrainingOrder`.

    If there are more micro-batches than in the order, it is repeated, round after round without a barrier; if there are
    fewer, the missing ones are left out. Both are valid where the order is.
    """

    name: str
    stages: tuple[tuple[Word, ...], ...]
    num_micro_batches: int
    held: tuple[int, ...]
    """For each stage, the most micro-batches whose forward has begun and whose backward has not ended."""

    def __call__(self, workload: Workload) -> Schedule:
        """
        Args:
            workload: of one pipeline with as many stages, which are its ranks.
        """
        (pipeline,) = workload.pipelines
        assert pipeline.num_stages == len(self.stages), f"{self.name} is for {len(self.stages)} stages"
        count = pipeline.num_microbatches
        rows: list[list[tuple[int, Kind, int, int]]] = [[] for _ in range(workload.num_ranks)]
        for stage, words in enumerate(self.stages):
            rows[pipeline.ranks[stage]] = [
                (0, kind, stage, first + index)
                for first in range(0, count, self.num_micro_batches)
                for kind, index in words
                if first + index < count
            ]
        return schedule_of(workload, rows, self.name)

    def in_flight(self, stage: int, num_stages: int, count: int) -> int:
        """See `TrainingOrder.in_flight`; of any number of micro-batches as many as of `num_micro_batches`."""
        return self.held[stage]


def stated_order(schedule: Schedule, role: str, num_stages: int) -> StatedOrder:
    """Read a schedule whose row i is stage i, with forwards and backwards of one copy of one model, named as the role
    or not at all.

    Raises:
        DataError: names the action at which it is no order of such a pipeline: one that is missing, doubled, on another
            stage, out of order, or waits for itself.
    """
    if schedule.num_ranks != num_stages:
        raise DataError(f"expected a row for each of {num_stages} pipeline stages, found {schedule.num_ranks}")
    check_actions(schedule, role)
    model = next((action.model for action in schedule), "")
    for action in schedule:
        if action.model not in ("", role) or action.model != model or action.copy:
            raise DataError(
                f"{action.id} in row {action.rank}: expected actions of {role} alone, such as {role}:0F0 or 0F0; every "
                "copy follows them"
            )
    count = 1 + max((action.index or 0 for action in schedule), default=-1)
    if not count:
        raise DataError("expected actions, found none")
    table = ((1.0,) * count,) * num_stages
    workload = Workload((Pipeline(model, 0, tuple(range(num_stages)), table, table, table),), num_stages)
    validate(schedule, workload)
    return StatedOrder(
        schedule.name,
        tuple(tuple((action.kind, action.index or 0) for action in row) for row in schedule.rows),
        count,
        tuple(max(most.values()) for most in in_flight(schedule)),
    )


def check_actions(schedule: Schedule, role: str) -> None:
    """
    Args:
        role: for the examples in messages.

    Raises:
        DataError: an action that is no forward or backward of a micro-batch, or that waits for what its pipeline does
            not have it wait for.
    """
    present = {action.id for action in schedule}
    for action in schedule:
        if action.kind not in (Kind.FORWARD, Kind.BACKWARD) or action.index is None or action.round is not None:
            raise DataError(
                f"{action.id} in row {action.rank}: expected forwards and backwards of micro-batches, such as "
                f"{role}:0F0 and {role}:0B0; what goes between stages is sent and received without being listed"
            )
        if action.waits != natural_waits(action, present):
            raise DataError(
                f"{action.id} in row {action.rank} waits for {' and '.join(action.waits) or 'nothing'}; a stage waits "
                "for what it is sent, leave the rest out"
            )
        if action.index >= len(schedule):
            raise DataError(f"{action.id} in row {action.rank}: expected micro-batches numbered from 0")
