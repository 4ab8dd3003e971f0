"""Where the calls of a flow run: named plans, completed plans, and what one role needs of a plan.

Enters: a traced flow, which of its roles are models, and a plan or the name of one. Leaves: a plan in which every call
of every model has its place. What the models allow is checked by `runtime.placement`, which knows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.layout.mesh import Layout
from plait.schedule.plan import After, Mode, Placement, Plan

DEFAULT_SCHEDULE = "1F1B"
SCHEDULES = (DEFAULT_SCHEDULE, "gpipe", "one at a time")
"""Pipeline schedules by rule (`schedule.generators`), which fit any number of micro-batches."""


@dataclass(frozen=True)
class RolePlacement:
    """Where one model role runs, over all its calls. Of a completed plan; None or empty: it is not asked to."""

    role: str
    train: Layout | None = None
    score: Layout | None = None
    """Log-probs, values and scores; dp divides the rows."""
    generate: tuple[Layout, ...] = ()
    """Instances, each with dp 1, on devices of their own."""
    micro_batch_tokens: Mapping[Mode, int] = field(default_factory=dict)
    """Of `train` and `score`, where the plan says other than the recipe."""
    after: Mapping[Mode, After] = field(default_factory=dict)
    """What becomes of the parameters of `train`, `score` or `decode` when the call is done; keep where it is not
    named."""
    schedule: str = DEFAULT_SCHEDULE
    """Of the training's pipeline: one of SCHEDULES."""

    @property
    def home(self) -> Layout:
        """The layout whose weights are the role's own; those of the others are moved from there."""
        home = self.train or self.score or next(iter(self.generate), None)
        assert home is not None, f"role {self.role} has no place"
        return home

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Every different layout, `home` first, then as the calls of a step follow each other."""
        found = (self.home, *self.generate, *(layout for layout in (self.score, self.train) if layout is not None))
        return tuple(dict.fromkeys(found))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that holds something of the role, ascending."""
        return tuple(sorted({rank for layout in self.layouts for rank in layout.mesh.ranks}))


def placements_of(plan: Plan, role: str) -> RolePlacement:
    """The places of a model role in a completed plan (`complete`)."""
    mine = [p for p in plan.placements if p.call.split(".")[0] == role]
    assert mine, f"plan {plan.name} has no place for role {role}"
    of_mode = lambda *modes: [p for p in mine if p.mode in modes]  # noqa: E731
    single: dict[Mode, Placement] = {p.mode: p for p in of_mode("train", "score")}
    train, score = single.get("train"), single.get("score")
    return RolePlacement(
        role,
        None if train is None else train.layout,
        None if score is None else score.layout,
        tuple(dict.fromkeys(instance for p in of_mode("decode") for instance in p.layout.instances())),
        {mode: p.micro_batch_tokens for mode, p in single.items() if p.micro_batch_tokens is not None},
        {p.mode: p.after for p in mine if p.after != "keep"},
        (train.schedule if train is not None else "") or DEFAULT_SCHEDULE,
    )


def layouts_of(plan: Plan) -> tuple[Layout, ...]:
    """Every different layout of a completed plan in one order that all ranks share, instances by themselves: what
    `models.team.make_teams` is called with."""
    roles = dict.fromkeys(p.call.split(".")[0] for p in plan.placements)
    return tuple(dict.fromkeys(layout for role in roles for layout in placements_of(plan, role).layouts))
