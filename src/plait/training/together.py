"""Several roles that train together: one schedule computes their open mini-batches on the ranks that they share, and
each mini-batch closes with an optimizer step of its own.

Gradients, clipping and steps of each role are those of training it by itself, to the bit: the order of the plan keeps
the order of a role's forwards, and of its backwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.models.parallel.team import Team
from plait.schedule.fused import FusedOrder
from plait.schedule.pipeline import Workload
from plait.schedule.validate import validate
from plait.schedule.work import Work
from plait.training.passes import OpenMiniBatch
from plait.training.pipeline import execute
from plait.training.results import counted
from plait.training.trainer import BegunTraining


def train_together(begun: Sequence[BegunTraining], order: FusedOrder, team: Team) -> Work[list[list[dict[str, float]]]]:
    """Train all roles, mini-batch by mini-batch; one forward, backward, message or optimizer step per `next()`.

    A role with fewer mini-batches than another, because it has fewer samples, has no part in the last ones.

    Args:
        begun: the training of each role, in an order that all ranks share.
        order: of these roles.
        team: of `order.layout`.

    Returns:
        The metrics of each, as `Trainer.train` returns them.

    Raises:
        RunError: as of `Trainer.train`.
    """
    teams = [team, *(role.trainer.team for role in begun)]
    while opened := {role.trainer.role: (role, mine) for role in begun if (mine := role.open()) is not None}:
        yield from counted(_mini_batches(opened, order, team), *teams)
    return [role.metrics() for role in begun]


def _mini_batches(
    opened: Mapping[str, tuple[BegunTraining, OpenMiniBatch]], order: FusedOrder, team: Team
) -> Work[None]:
    """Compute and close one open mini-batch of each role."""
    pipelines = [
        opened[role][1].pipeline(copy, rows) for role, copy, rows in order.copies_in(team.dp.index) if role in opened
    ]
    workload = Workload(tuple(pipelines), len(order.rows))
    schedule = order(workload)
    validate(schedule, workload)
    yield from execute(
        schedule,
        {mine.key: mine.stage for _, mine in opened.values()},
        team.pp,
        name="+".join(mine.name for _, mine in opened.values()),
        names={role: mine.names for role, (_, mine) in opened.items()},
        in_order=team.pp.in_order,
    )
    for begun, mine in opened.values():
        if (step := begun.close(mine)) is not None:
            yield step
