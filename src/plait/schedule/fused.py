"""The order in which several roles train together on the same ranks, as a plan states it (RLHFuse, intra-stage fusion).

Each role has a pipeline through the same ranks, or several copies of one side by side; those of another role run the
other way, and fill the gaps of the first. The order is made a rule for as many micro-batches as mini-batches have, and
for as many copies of all of it (dp) as there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from plait.errors import DataError
from plait.layout.mesh import Layout, Mesh, Parallelism
from plait.schedule.action import Kind
from plait.schedule.pipeline import Pipeline, Workload, schedule_of
from plait.schedule.plan import Placement
from plait.schedule.schedule import Schedule
from plait.schedule.stated import check_actions
from plait.schedule.validate import validate

Word = tuple[str, int, Kind, int, int]
"""Role, copy, forward or backward, stage, micro-batch."""


@dataclass(frozen=True)
class FusedOrder:
    """What each rank does when these roles train together.

    If there are more micro-batches than in the order, it is repeated, round after round without a barrier; if there are
    fewer, the missing ones are left out. Both are valid where the order is. The roles share ranks: row i of the order
    is for all ranks at pipeline stage i of `layout`, in each of its copies and each of its tensor-parallel ranks.
    """

    name: str
    rows: tuple[tuple[Word, ...], ...]
    num_micro_batches: Mapping[str, int]
    """Role → micro-batches of each copy of it."""
    places: Mapping[tuple[str, int], tuple[int, ...]]
    """(role, copy) → the row of each stage."""
    layout: Layout
    """Ranks of the rows: a copy (dp) of it is as many of each role's copies as the order names."""

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self.num_micro_batches)

    def num_copies(self, role: str) -> int:
        """Copies of a role in the order."""
        return sum(of_copy == role for of_copy, _ in self.places)

    def copies_in(self, block: int) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
        """(role, dp index of its copy, row of each stage) of all that runs on a copy of `layout`."""
        return tuple((role, block * self.num_copies(role) + copy, rows) for (role, copy), rows in self.places.items())

    @cached_property
    def in_flight(self) -> tuple[Mapping[str, int], ...]:
        """For each row, role → the most micro-batches whose forward has begun and whose backward has not ended."""
        counts = []
        for row in self.rows:
            now, most = dict.fromkeys(self.roles, 0), dict.fromkeys(self.roles, 0)
            for role, _, kind, _, _ in row:
                now[role] += 1 if kind is Kind.FORWARD else -1
                most[role] = max(most[role], now[role])
            counts.append(most)
        return tuple(counts)

    def in_flight_on(self, rank: int) -> Mapping[str, int]:
        """`in_flight` of the row that a rank is."""
        return self.in_flight[self.layout.coordinates(rank).pp]

    def __call__(self, workload: Workload) -> Schedule:
        """
        Args:
            workload: pipelines of `copies_in` one copy of the layout, all or some of them, on its rows.
        """
        numbers = {(p.model, p.copy % self.num_copies(p.model)): i for i, p in enumerate(workload.pipelines)}
        counts = {key: workload.pipelines[i].num_microbatches for key, i in numbers.items()}
        rounds = max((-(-count // self.num_micro_batches[role]) for (role, _), count in counts.items()), default=0)
        rows = [
            [
                (numbers[role, copy], kind, stage, number)
                for turn, (role, copy, kind, stage, index) in product(range(rounds), row)
                if (number := turn * self.num_micro_batches[role] + index) < counts.get((role, copy), 0)
            ]
            for row in self.rows
        ]
        return schedule_of(workload, rows, self.name)


def models_of(schedule: Schedule) -> tuple[str, ...]:
    """Names of the models in a schedule, in the order in which its rows name them."""
    return tuple(dict.fromkeys(action.model for action in schedule))


def fused_order(schedule: Schedule, placements: Mapping[str, Placement]) -> FusedOrder:
    """Read a schedule of several roles, as `plait schedule --out` writes it, with forwards and backwards alone.

    Args:
        placements: role → where it trains, of all that the plan has follow the schedule.

    Raises:
        DataError: names the action at which it is no order of such pipelines, or the role whose placement does not fit.
    """
    roles = models_of(schedule)
    if missing := next((role for role in roles if role not in placements), None):
        raise DataError(
            f"{missing or 'a model without a name'} is in it, but does not follow it; found actions of "
            f"{_listed(roles)}, followed by {_listed(tuple(placements))}: a placement with mode train names the "
            "schedule for each"
        )
    if unused := next((role for role in placements if role not in roles), None):
        raise DataError(f"{unused} follows it, but has no actions in it; found those of {_listed(roles)}")
    check_actions(schedule, roles[0])
    counts = {role: 1 + max(action.index or 0 for action in schedule if action.model == role) for role in roles}
    places = {
        (role, copy): _rows_of(schedule, role, copy, placements[role].pp)
        for role in roles
        for copy in range(1 + max(action.copy for action in schedule if action.model == role))
    }
    _check_complete(schedule, counts, places)
    words = tuple(tuple((a.model, a.copy, a.kind, a.stage, a.index or 0) for a in row) for row in schedule.rows)
    return FusedOrder(schedule.name, words, counts, places, _layout(schedule.num_ranks, placements, places))


def _rows_of(schedule: Schedule, role: str, copy: int, num_stages: int) -> tuple[int, ...]:
    """The row of each stage."""
    rows: dict[int, int] = {}
    for action in schedule:
        if (action.model, action.copy) == (role, copy):
            rows.setdefault(action.stage, action.rank)
    label = f"{role}/{copy}" if copy else role
    if sorted(rows) != list(range(num_stages)):
        raise DataError(
            f"expected actions of {num_stages} stages of {label}, the `pp` of its placement, found those of "
            f"{_listed([str(stage) for stage in sorted(rows)]) or 'none'}"
        )
    if len(set(rows.values())) < num_stages:
        raise DataError(f"expected each stage of {label} in a row of its own, found {list(rows.values())}")
    return tuple(rows[stage] for stage in range(num_stages))


def _check_complete(
    schedule: Schedule, counts: Mapping[str, int], places: Mapping[tuple[str, int], tuple[int, ...]]
) -> None:
    pipelines = []
    for (role, copy), rows in places.items():
        table = ((1.0,) * counts[role],) * len(rows)
        pipelines.append(Pipeline(role, copy, rows, table, table, table))
    validate(schedule, Workload(tuple(pipelines), schedule.num_ranks))


def _layout(
    num_rows: int, placements: Mapping[str, Placement], places: Mapping[tuple[str, int], tuple[int, ...]]
) -> Layout:
    """Where the rows are: the same for every role, or it is refused."""
    first, *others = placements
    copies = {role: sum(of_copy == role for of_copy, _ in places) for role in placements}
    mine = placements[first]
    blocks, rest = divmod(mine.dp, copies[first])
    if rest:
        raise DataError(
            f"it has {copies[first]} copies of {first}, which do not divide the {mine.dp} (`dp`) of its placement"
        )
    for role in others:
        p = placements[role]
        if p.tp != mine.tp:
            raise DataError(
                f"expected one `tp` of {first} and {role}, whose stages share ranks, found {mine.tp} and {p.tp}"
            )
        if p.dp != blocks * copies[role]:
            raise DataError(
                f"expected `dp` {blocks * copies[role]} of {role} beside dp {mine.dp} of {first}: it has "
                f"{copies[role]} copies of {role} for {copies[first]} of {first}, found {p.dp}"
            )
    ranks: dict[tuple[int, int, int], int] = {}
    for (role, copy), rows in places.items():
        if role == first:
            for block, (stage, row), t in product(range(blocks), enumerate(rows), range(mine.tp)):
                ranks[block, row, t] = mine.layout.rank_at(block * copies[role] + copy, t, stage)
    if len(ranks) < blocks * num_rows * mine.tp:
        empty = next(row for row in range(num_rows) if (0, row, 0) not in ranks)
        raise DataError(f"expected every role in every row, found no action of {first} in row {empty}")
    for role in others:
        _check_ranks(role, placements[role], copies[role], places, ranks, first)
    mesh = tuple(ranks[key] for key in sorted(ranks))
    return Layout(Mesh(mesh), Parallelism(blocks, mine.tp, num_rows))


def _check_ranks(
    role: str,
    p: Placement,
    copies: int,
    places: Mapping[tuple[str, int], tuple[int, ...]],
    ranks: Mapping[tuple[int, int, int], int],
    first: str,
) -> None:
    """
    Args:
        ranks: (copy of the layout, row, place among tensor-parallel ranks) → the rank that it is for the role `first`.
    """
    blocks = p.dp // copies
    expected = tuple(
        ranks[block, row, t]
        for block, copy in product(range(blocks), range(copies))
        for row in places[role, copy]
        for t in range(p.tp)
    )
    if expected != p.ranks:
        raise DataError(
            f"expected `ranks` {list(expected)} of {role}, so that its stages are in the rows of the schedule, beside "
            f"those of {first}, found {list(p.ranks)}"
        )


# -- an order that is yet to be found

FUSED = "fused"
"""The name of an order that a run finds by itself, where the plan states none of this name."""


def shared_rows(placements: Mapping[str, Placement]) -> dict[tuple[str, int], tuple[int, ...]]:
    """(role, copy) → the row of each stage, of roles that share ranks: as `FusedOrder.places`. The role with the most
    stages runs as one copy, whose stages are the rows.

    Args:
        placements: role → where it trains.

    Raises:
        DataError: names the role and the key for which there are no such rows.
    """
    if len(placements) < 2:
        raise DataError(f"expected several roles that train together, found {_listed(tuple(placements))} alone")
    first = max(placements, key=lambda role: placements[role].pp)
    mine = placements[first]
    if mine.pp == 1:
        raise DataError(f"expected `pp` above 1 of {first} or another role, found 1 of all")
    wide = mine.layout
    at = {rank: wide.coordinates(rank) for rank in mine.ranks}
    rows_of_copies: dict[tuple[str, int], tuple[int, ...]] = {}
    for role, p in placements.items():
        if set(p.ranks) != set(mine.ranks) or p.tp != mine.tp:
            raise DataError(
                f"expected {role} on the same ranks and with the same tp as {first}, {sorted(mine.ranks)} and "
                f"{mine.tp}, found {sorted(p.ranks)} and {p.tp}"
            )
        if mine.pp % p.pp:
            raise DataError(f"expected `pp` of {role} that divides {mine.pp}, that of {first}, found {p.pp}")
        copies, layout = mine.pp // p.pp, p.layout
        for d, stage, t in product(range(p.dp), range(p.pp), range(p.tp)):
            rank = layout.rank_at(d, t, stage)
            rows = rows_of_copies.setdefault((role, d % copies), ())
            if stage == len(rows):
                rows_of_copies[role, d % copies] = rows = (*rows, at[rank].pp)
            if (at[rank].dp, at[rank].tp, at[rank].pp) != (d // copies, t, rows[stage]):
                raise DataError(
                    f"`ranks` of {role}: rank {rank} has stage {stage} of its copy {d}, and not the place beside "
                    f"{first} that the order needs; list the ranks of each copy of {first} together, in one order"
                )
    return rows_of_copies


def _listed(names: Sequence[str]) -> str:
    return " and ".join(name or "no name" for name in names)
