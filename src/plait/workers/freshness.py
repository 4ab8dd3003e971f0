"""Which copies of roles' weights are as those of their home, as far as the leader knows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from plait.cost.offload_policy import Copies
from plait.schedule.plan import Mode

Copy = tuple[str, int]
"""A role, and a number in `RankState.copies`."""


class Freshness:
    """
    Args:
        copies: role → its copies.
        held: role → numbers of the copies that keep older weights while the role is trained.
    """

    def __init__(self, copies: Mapping[str, Sequence[Copies]], held: Mapping[str, Collection[int]]) -> None:
        self._copies, self._held = copies, held
        self._dropped = {
            (role, number)
            for role, copies_of_role in copies.items()
            for number, copies_here in enumerate(copies_of_role)
            if copies_here.after == "drop"
        }
        """Copies that are dropped before a command that does not need them."""
        self.stale: set[Copy] = set(self._dropped)
        """Copies without the role's current weights: the role has been trained since they were moved, or they may have
        been dropped."""
        self._changes = dict.fromkeys(copies, 0)
        """Role → how many commands that change its weights have been announced."""
        self._in_held = dict.fromkeys(copies, 0)
        """Role → that number when its held copies were last given weights."""

    def weights_number(self, role: str) -> int:
        """The number of the weights that a role generates with: another after each change that its engines have got.
        Weights that were away, or are moved anew because they were dropped, have the number that they had."""
        return (self._in_held if self._held[role] else self._changes)[role]

    def told(self, ranks: Collection[int], needed: Collection[Copy]) -> None:
        """These ranks have been told a command that needs these copies."""
        dropped = {(role, n) for role, n in self._dropped if not self._ranks(role, n).isdisjoint(ranks)}
        self.stale |= dropped - set(needed)

    def _ranks(self, role: str, number: int) -> set[int]:
        """That have some of these copies."""
        return {rank for rank, _ in self._copies[role][number].parts}

    def trained(self, role: str) -> None:
        """What changes the weights of the role has been announced."""
        self.stale |= {(role, number) for number in range(len(self._copies[role]))}
        self._changes[role] += 1

    def moved(self, copies: Collection[Copy]) -> None:
        """They have been announced to be brought the weights."""
        self.stale -= set(copies)
        self._in_held |= {role: self._changes[role] for role, number in copies if number in self._held[role]}

    def behind(self, role: str, mode: Mode | None) -> list[int]:
        """Numbers of the copies that are to be brought weights for a mode; None: those that stay on their devices."""
        passed_over = () if mode is None else self._held[role]
        return [
            number
            for number, copies in enumerate(self._copies[role])
            if (role, number) in self.stale
            and number not in passed_over
            and (copies.after == "keep" if mode is None else mode in copies.modes)
        ]

    def is_fresh(self, role: str, mode: Mode) -> bool:
        """Whether a role's weights are, as they are, where they are needed for a mode."""
        return not self.behind(role, mode)
