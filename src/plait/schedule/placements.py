"""What one model role needs of a completed plan (`completion.complete`): where it trains, scores and generates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from plait.layout.mesh import Layout
from plait.schedule.fused import FUSED, FusedOrder, fused_order, models_of
from plait.schedule.plan import SEVERAL, After, Mode, Placement, Plan
from plait.schedule.schedule import Schedule
from plait.schedule.stated import stated_order
from plait.schedule.training_order import DEFAULT_ORDER, TrainingOrder, rule_named

PartKey = tuple[Any, ...]
"""Which part of a model a rank has, and with whom it computes: on one rank, equal keys are one part."""

WHOLE: PartKey = ("whole",)


@dataclass(frozen=True)
class RolePlacement:
    """Where one model role runs, over all its calls. Of a completed plan; None or empty: it is not asked to."""

    role: str
    train: Layout | None = None
    score: Layout | None = None
    """Log-probs, values and scores; dp divides the rows."""
    generate: tuple[Layout, ...] = ()
    """Instances, each with dp 1, on devices of their own; those of `prefill` stand last."""
    micro_batch_tokens: Mapping[Mode, int] = field(default_factory=dict)
    """Tokens for `train` and `score`, where the plan says other than the recipe."""
    after: Mapping[tuple[Mode, int], After] = field(default_factory=dict)
    """What becomes of the parameters of `train`, `score` or `decode` on a rank when the call is done; keep where it is
    not named."""
    order: TrainingOrder = DEFAULT_ORDER
    """The order of the actions of `train`'s stages while the role trains by itself."""
    together: FusedOrder | None = None
    """The order in which this role and others train together; None: it always trains by itself. In steps in which the
    others do not train, it trains alone, by `order`."""
    prefill: tuple[Layout, ...] = ()
    """Those of `generate` that compute the prompts, for the others to draw the samples. Empty: those compute them."""

    @property
    def home(self) -> Layout:
        """The layout that holds the role's own weights; other layouts get theirs from it."""
        home = self.train or self.score or next(iter(self.generate), None)
        assert home is not None, f"role {self.role} has no place"
        return home

    @property
    def drawing(self) -> tuple[Layout, ...]:
        """Those of `generate` that draw samples."""
        return self.generate[: len(self.generate) - len(self.prefill)]

    @property
    def scoring(self) -> Layout:
        """Where log-probs, values and scores are computed, though no call of the flow may ask for them."""
        return self.score or self.home

    @property
    def trains_with(self) -> tuple[str, ...]:
        """The roles that train when this one does, itself among them."""
        return (self.role,) if self.together is None else self.together.roles

    def in_flight(self, rank: int, count: int) -> int:
        """The most micro-batches whose activations a rank of `train` holds at a time.

        Args:
            count: micro-batches of a mini-batch, where the role trains by itself.
        """
        assert self.train is not None, f"role {self.role} has no place to train"
        alone = self.order.in_flight(self.train.coordinates(rank).pp, self.train.parallelism.pp, count)
        return alone if self.together is None else max(alone, self.together.in_flight_on(rank)[self.role])

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Every different layout, `home` first, then as the calls of a step follow each other."""
        every = (self.home, *self.generate, *(layout for layout in (self.score, self.train) if layout is not None))
        return tuple(dict.fromkeys(every))

    @cached_property
    def movers(self) -> tuple[int, ...]:
        """Ranks that take part in bringing the role's weights from its home to where else they are used."""
        return () if self.uses.keys() <= parts_of(self.home) else self.ranks

    def layouts_on(self, rank: int) -> tuple[Layout, ...]:
        """Those of `layouts` that have a place for a rank, in their order."""
        return self._by_rank.get(rank, ())

    def instance_on(self, rank: int) -> Layout | None:
        """The instance that generates on a rank."""
        return next((layout for layout in self.layouts_on(rank) if layout in self._instances), None)

    def drawing_on(self, rank: int) -> Layout | None:
        """The instance that draws samples on a rank."""
        instance = self.instance_on(rank)
        return None if instance in self.prefill else instance

    @cached_property
    def _instances(self) -> frozenset[Layout]:
        return frozenset(self.generate)

    @cached_property
    def _by_rank(self) -> dict[int, tuple[Layout, ...]]:
        by_rank: dict[int, tuple[Layout, ...]] = {}
        for layout in self.layouts:
            for rank in layout.mesh.ranks:
                by_rank[rank] = (*by_rank.get(rank, ()), layout)
        return by_rank

    @cached_property
    def uses(self) -> Mapping[tuple[int, PartKey], frozenset[Mode]]:
        """(rank, part that it has) → the modes that compute with it, the home's parts first."""
        modes_of_parts: dict[tuple[int, PartKey], set[Mode]] = {}
        by_mode: tuple[tuple[Mode, tuple[Layout, ...]], ...] = (
            ("train", () if self.train is None else (self.train,)),
            ("score", () if self.score is None else (self.score,)),
            ("decode", self.generate),
        )
        for mode, layouts in by_mode:
            for layout in layouts:
                for rank in layout.mesh.ranks:
                    modes_of_parts.setdefault((rank, part_key(layout, rank)), set()).add(mode)
        return {part: frozenset(modes) for part, modes in modes_of_parts.items()}

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that holds something of the role, ascending."""
        return tuple(sorted({rank for layout in self.layouts for rank in layout.mesh.ranks}))


def part_key(layout: Layout, rank: int) -> PartKey:
    """The key of the part that a rank of the layout holds."""
    sizes = layout.parallelism
    if layout.shards_weights:
        return ("share", layout.mesh.ranks, sizes.tp, sizes.pp, sizes.stages)
    if sizes.tp == sizes.pp == 1:
        return WHOLE
    instance = layout.instance_of(rank)
    return (instance.mesh.ranks, sizes.tp, sizes.pp, sizes.stages)


def parts_of(layout: Layout) -> frozenset[tuple[int, PartKey]]:
    """(rank, its part) of every rank of a layout."""
    return frozenset((rank, part_key(layout, rank)) for rank in layout.mesh.ranks)


def placements_of(plan: Plan, role: str) -> RolePlacement:
    """The places of a model role in a completed plan (`complete`)."""
    mine = [p for p in plan.placements if p.role == role]
    assert mine, f"plan {plan.name} has no place for role {role}"
    of_mode = lambda *modes: [p for p in mine if p.mode in modes]
    single: dict[Mode, Placement] = {p.mode: p for p in of_mode("train", "score")}
    train, score = single.get("train"), single.get("score")
    order, together = (DEFAULT_ORDER, None) if train is None else orders_of(plan, train)
    drawing, prefill = (
        tuple(dict.fromkeys(instance for p in of_mode(mode) for instance in p.layout.instances()))
        for mode in ("decode", "prefill")
    )
    return RolePlacement(
        role,
        None if train is None else train.layout,
        None if score is None else score.layout,
        (*drawing, *prefill),
        {mode: p.micro_batch_tokens for mode, p in single.items() if p.micro_batch_tokens is not None},
        {
            ("decode" if p.mode in SEVERAL else p.mode, rank): p.after
            for p in mine
            if p.after != "keep"
            for rank in p.ranks
        },
        order,
        together,
        prefill,
    )


def orders_of(plan: Plan, train: Placement) -> tuple[TrainingOrder, FusedOrder | None]:
    """The orders that a role's training follows: alone, and together with other roles (None: it always trains alone).

    Args:
        train: where it trains.

    Raises:
        DataError: the schedule of the plan that it names is no order of its pipeline, or of those of its followers.
    """
    stated = plan.schedule(train.schedule)
    if stated is None:
        return rule_named(train.schedule), None
    if not is_fused(stated):
        return stated_order(stated, train.role, train.pp), None
    together = fused_order(stated, _followers(plan, stated.name))
    return replace(DEFAULT_ORDER, num_micro_batches=together.num_micro_batches[train.role]), together


def is_fused(schedule: Schedule) -> bool:
    """Whether several roles train together by it, each named in its actions."""
    return len(set(models_of(schedule)) - {""}) > 1


def to_be_found(plan: Plan) -> dict[str, Placement]:
    """Role → where it trains, of those that train together by an order that is not stated (`fused`); none: it is."""
    return {} if plan.schedule(FUSED) is not None else _followers(plan, FUSED)


def _followers(plan: Plan, name: str) -> dict[str, Placement]:
    """Role → its placement, of those that train by a schedule."""
    followers: dict[str, Placement] = {}
    for p in plan.placements:
        if p.mode == "train" and p.schedule == name:
            followers.setdefault(p.role, p)
    return followers


def layouts_of(plan: Plan) -> tuple[Layout, ...]:
    """Every different layout of a completed plan in one order that all ranks share, instances by themselves, with
    those of roles that train together."""
    roles = dict.fromkeys(p.role for p in plan.placements)
    places = [placements_of(plan, role) for role in roles]
    joint = [place.together.layout for place in places if place.together is not None]
    return tuple(dict.fromkeys([*(layout for place in places for layout in place.layouts), *joint]))
