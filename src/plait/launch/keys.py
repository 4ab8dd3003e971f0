"""The keys of a group's rendezvous, kept by its controller: what `torch.distributed` needs to make process groups.

The ranks ask over the connection that they have to the controller, whose every message carries a tag made with the
group's key. So nothing listens, and no other process of the machine can read or set a key.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Get:
    """The values, in this order, as soon as each key is there."""

    keys: tuple[str, ...]


@dataclass(frozen=True)
class Check:
    """Whether each key is there now: b"1" or b""."""

    keys: tuple[str, ...]


@dataclass(frozen=True)
class Set:
    values: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True)
class Append:
    key: str
    value: bytes


@dataclass(frozen=True)
class Add:
    """The sum, in decimal digits. A key that is not there counts as 0."""

    key: str
    amount: int


@dataclass(frozen=True)
class CompareSet:
    """Set if the value is the expected one, or if none is there and b"" was expected. The value that is there then; the
    expected one where there is none."""

    key: str
    expected: bytes
    desired: bytes


@dataclass(frozen=True)
class Delete:
    """b"1" if the key was there, else b""."""

    key: str


@dataclass(frozen=True)
class Count:
    """How many keys there are, in decimal digits."""


@dataclass(frozen=True)
class GiveUp:
    """Do not answer question `number` any more; not answered either."""

    number: int


Question = Get | Check | Set | Append | Add | CompareSet | Delete | Count | GiveUp
Answer = tuple[bytes, ...]


class Keys:
    """The values, and who waits for some. Not safe for use by two threads at once: the owner locks."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[tuple[int, int], Get] = {}
        """By (rank, number of its question)."""

    def ask(self, rank: int, number: int, question: Question) -> list[tuple[int, int, Answer]]:
        """Do what a rank asks for.

        Returns:
            (rank, number, answer) of each question that can be answered now: this one, and those of ranks that waited
            for the keys that it has set.
        """
        match question:
            case Get():
                self._waiting[rank, number] = question
                return self._ready()
            case GiveUp():
                self._waiting.pop((rank, question.number), None)
                return []
        answer = self._changed(question)
        return [(rank, number, answer), *self._ready()]

    def _ready(self) -> list[tuple[int, int, Answer]]:
        ready = [asked for asked, get in self._waiting.items() if all(key in self._values for key in get.keys)]
        return [(*asked, tuple(self._values[key] for key in self._waiting.pop(asked).keys)) for asked in ready]

    def _changed(self, question: Check | Set | Append | Add | CompareSet | Delete | Count) -> Answer:
        values = self._values
        match question:
            case Check(keys):
                return (_yes(all(key in values for key in keys)),)
            case Set(pairs):
                values.update(pairs)
                return ()
            case Append(key, value):
                values[key] = values.get(key, b"") + value
                return ()
            case Add(key, amount):
                values[key] = str(int(values.get(key, b"0")) + amount).encode()
                return (values[key],)
            case CompareSet(key, expected, desired):
                if values.get(key, b"") == expected:
                    values[key] = desired
                return (values.get(key, expected),)
            case Delete(key):
                return (_yes(values.pop(key, None) is not None),)
            case Count():
                return (str(len(values)).encode(),)


def _yes(is_so: bool) -> bytes:
    return b"1" if is_so else b""
