"""What becomes of weights and optimizer state while nobody uses them: `after` of the placements, for all that shares.

Where several calls use one part of a model on a rank, the most careful word holds: keep before offload before drop.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.recipes.role_models import RoleModel
from plait.schedule.placements import PartKey, parts_of, placements_of
from plait.schedule.plan import After, Mode, Plan

CAREFUL: tuple[After, ...] = ("keep", "offload", "drop")
"""The most careful first."""

Use = tuple[str, Mode]
"""A role and what it is asked for."""

Owner = tuple[str | bool, ...]
"""Whose weights: equal for roles that share them."""


@dataclass(frozen=True)
class Copies:
    """Copies of a role's weights that are moved from its home together."""

    modes: frozenset[Mode]
    """That compute with them."""
    after: After
    parts: frozenset[tuple[int, PartKey]]
    """(rank, part)."""
    ranks: tuple[int, ...]
    """That take part in the move, those of the home included; ascending."""


class OffloadPolicy:
    """What becomes of what each rank holds.

    Args:
        models: which model each role begins as.
        plan: completed.
        adapted: whether roles have adapters, on weights that all of a checkpoint share.
    """

    def __init__(self, models: Sequence[RoleModel], plan: Plan, *, adapted: bool) -> None:
        self._models = {model.role: model for model in models}
        self._places = {model.role: placements_of(plan, model.role) for model in models}
        self.adapted = adapted
        self._uses: dict[tuple[Owner, int, PartKey], list[Use]] = {}
        for model in models:
            for (rank, key), modes in self._places[model.role].uses.items():
                self._uses.setdefault((self.owner(model.role), rank, key), []).extend((model.role, m) for m in modes)
        words = {after for place in self._places.values() for after in place.after.values()}
        self.keeps_all = not words
        """Whether nothing ever leaves its device."""

    def owner(self, role: str) -> Owner:
        """Roles that change have weights of their own, others that begin as the same share theirs; with adapters all
        roles do."""
        model = self._models[role]
        if self.adapted:
            return ("base", model.name, model.has_head)
        return (role,) if model.changes else ("frozen", model.name, model.scalar)

    def uses(self, role: str, rank: int, key: PartKey) -> Sequence[Use]:
        """What computes with the weights that a role has there."""
        return self._uses[self.owner(role), rank, key]

    def of_weights(self, role: str, rank: int, key: PartKey) -> After:
        return self._most_careful(self.uses(role, rank, key), rank)

    def of_adapter(self, role: str, rank: int, key: PartKey) -> After:
        """When what is the role's alone leaves, where weights are shared."""
        return self._most_careful([(role, mode) for mode in self._places[role].uses[rank, key]], rank)

    def of_state(self, role: str, rank: int) -> After:
        """When the optimizer's state leaves, which training alone reads."""
        return self._places[role].after.get(("train", rank), "keep")

    def copies(self, role: str) -> tuple[Copies, ...]:
        """All that is moved from the role's home: what stays together, the rest by who needs it. A frozen role's are
        read from its checkpoint, and moved only where they are dropped."""
        place, changes = self._places[role], self._models[role].changes
        home = parts_of(place.home)
        groups: dict[tuple[After, frozenset[Mode]], set[tuple[int, PartKey]]] = {}
        for part, modes in place.uses.items():
            if part in home:
                continue
            after = (self.of_adapter if self.adapted else self.of_weights)(role, *part)
            if changes or after == "drop":
                groups.setdefault((after, frozenset() if after == "keep" else modes), set()).add(part)
        groups_of_copies = [
            Copies(
                modes or frozenset(mode for part in parts for mode in place.uses[part]),
                after,
                frozenset(parts),
                tuple(sorted({*place.home.mesh.ranks, *(rank for rank, _ in parts)})),
            )
            for (after, modes), parts in groups.items()
        ]
        return tuple(sorted(groups_of_copies, key=lambda copies: (CAREFUL.index(copies.after), sorted(copies.modes))))

    @property
    def scores_with_copies(self) -> frozenset[str]:
        """Roles that score with copies, which have to be brought from their homes before."""
        return frozenset(role for role in self._places if any("score" in copies.modes for copies in self.copies(role)))

    def held_copies(self, role: str) -> tuple[int, ...]:
        """Numbers of the copies that can keep the previous weights while the role trains: those that only generate, on
        ranks that do not train it. Empty unless these are all copies that generate."""
        place = self._places[role]
        generating = {part for part, modes in place.uses.items() if "decode" in modes}
        training = set() if place.train is None else set(place.train.mesh.ranks)
        numbered = [(n, copies) for n, copies in enumerate(self.copies(role)) if copies.after == "keep"]
        alone = [(n, copies.parts) for n, copies in numbered if copies.modes == frozenset(("decode",))]
        apart = generating <= {part for _, parts in alone for part in parts}
        return tuple(n for n, _ in alone) if apart and training.isdisjoint(rank for rank, _ in generating) else ()

    def _most_careful(self, uses: Sequence[Use], rank: int) -> After:
        words: set[After] = {self._places[role].after.get((mode, rank), "keep") for role, mode in uses}
        return next(word for word in CAREFUL if word in words)
