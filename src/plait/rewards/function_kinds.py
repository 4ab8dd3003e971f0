"""What the functions of a pool give, rewards or the replies between turns, as messages name it."""

from __future__ import annotations

from dataclasses import dataclass

_FORKED = (
    "forked its worker process, and the child came back as if it were the worker; it was ended, and its answer is not "
    "taken: end such a child with `os._exit`, or start a program with `subprocess`"
)
STRANGE = "wrote something else than an answer on the connection of its worker process"


@dataclass(frozen=True)
class Kind:
    """What functions give."""

    noun: str
    plural: str
    section: str
    """The section of the recipe that has their keys."""

    @property
    def way_out(self) -> str:
        """What follows the message of a failure that ends the run."""
        return f"\n(`{self.section}.on_error: drop` leaves such samples out and goes on)"

    def limit(self, seconds: float) -> str:
        """The time limit of a call."""
        return f"{seconds:g} s (`{self.section}.timeout_s`)"

    def forked(self, who: str) -> str:
        """That a forked child of somebody came back."""
        return f"{who} {_FORKED}"


REWARD = Kind("reward", "rewards", "reward")
COST = Kind("reward", "rewards", "cost")
REPLY = Kind("reply", "replies", "turns")
