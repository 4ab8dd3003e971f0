"""Names of calls, which flows give and plans, traces and tables say: `actor.generate`, `actor.logprobs#2`."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class CallName(NamedTuple):
    """
    plain: without the number that calls have of which a flow makes several: the name of all of these
    role:  who is asked
    asks:  what for (`graph.Node.asks`); empty in the name of something that asks no role
    """

    plain: str
    role: str
    asks: str

    @classmethod
    def of(cls, text: str) -> CallName:
        """Read any text: one that names no call is a role that nothing is asked of."""
        plain = text.partition("#")[0]
        role, _, asks = plain.partition(".")
        return cls(plain, role, asks)


def numbered(call: str, used: Collection[str]) -> str:
    """A unique name for a call: its own, or with `#2`, `#3`, … if that is used."""
    return next(name for name in (call, *(f"{call}#{i}" for i in range(2, len(used) + 3))) if name not in used)
