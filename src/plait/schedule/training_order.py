"""The order in which a role that trains by itself goes through the stages of its pipeline.

A plan tells it in one of two ways: by the name of a rule (`RuleOrder`), or action by action (`stated.StatedOrder`).
Who needs the order asks it, and need not know which of them it is. Several roles that train together have an order of
all of them beside it (`fused.FusedOrder`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from plait.schedule.generators import gpipe, one_at_a_time, one_f_one_b
from plait.schedule.pipeline import Workload
from plait.schedule.schedule import Schedule


class TrainingOrder(Protocol):
    """What each stage does, for any number of micro-batches; of every copy of the model (dp) alike."""

    @property
    def name(self) -> str:
        """As a placement gives it."""
        ...

    @property
    def num_micro_batches(self) -> int | None:
        """Micro-batches that a mini-batch is split into for it; None: `pipeline.micro_batches_of` the stages."""
        ...

    def __call__(self, workload: Workload) -> Schedule:
        """The schedule of a mini-batch.

        Args:
            workload: of one pipeline.
        """
        ...

    def in_flight(self, stage: int, num_stages: int, count: int) -> int:
        """The most micro-batches whose forward has begun on a stage, and whose backward has not ended.

        Args:
            count: micro-batches of a mini-batch.
        """
        ...


class _Rule(NamedTuple):
    schedule: Callable[[Workload], Schedule]
    in_flight: Callable[[int, int], int]
    """Micro-batches whose forwards a stage does ahead of their backwards, by (stages from it to the end, itself
    included; micro-batches)."""


_RULES = {
    "1F1B": _Rule(one_f_one_b, min),
    "gpipe": _Rule(gpipe, lambda stages, count: count),
    "one at a time": _Rule(one_at_a_time, lambda stages, count: 1),
}
SCHEDULES = tuple(_RULES)
"""Names of the rules, as placements give them."""


def is_by_rule(schedule: str) -> bool:
    """Whether the `schedule` of a placement is a rule, which its role follows by itself. Roles whose placements give
    another name, and the same, train together."""
    return not schedule or schedule in SCHEDULES


@dataclass(frozen=True, slots=True)
class RuleOrder:
    """A rule of `schedule.generators`, by one of SCHEDULES; see `TrainingOrder`."""

    name: str = "1F1B"
    num_micro_batches: int | None = None

    def __call__(self, workload: Workload) -> Schedule:
        return _RULES[self.name].schedule(workload)

    def in_flight(self, stage: int, num_stages: int, count: int) -> int:
        return _RULES[self.name].in_flight(num_stages - stage, count)


DEFAULT_ORDER = RuleOrder()
"""Where a plan says nothing, and of a role that trains alone for once though it has an order with others."""


def rule_named(name: str) -> RuleOrder:
    """The rule of this name. Of any other, that of an order which is stated or yet to be found, say: the default."""
    return RuleOrder(name) if name in _RULES else DEFAULT_ORDER
