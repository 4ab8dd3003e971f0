"""Objects that are known by a number in this process: an operator of torch can be given tensors and numbers alone."""

from __future__ import annotations

from itertools import count
from typing import Self
from weakref import WeakValueDictionary

_numbers = count()
_known: WeakValueDictionary[int, Numbered] = WeakValueDictionary()


class Numbered:
    """Base of a dataclass, which may be frozen."""

    number: int
    """Unique in this process."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", next(_numbers))
        _known[self.number] = self

    @classmethod
    def numbered(cls, number: int) -> Self:
        """The one with this number."""
        found = _known[number]
        assert isinstance(found, cls), f"number {number} is {found}"
        return found
