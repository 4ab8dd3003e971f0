"""The store of `torch.distributed` whose keys lie with the controller (`keys`). Imports torch: for workers only."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistStoreError
from torch.distributed import Store as TorchStore  # pyright: ignore[reportPrivateImportUsage]

from plait.launch.keys import Add, Answer, Append, Check, CompareSet, Count, Delete, Get, Question, Set

STORE_TIMEOUT_S = 300.0
"""Seconds of one wait in the store; a rank that is missing is found by the controller long before."""


class ControllersStore(TorchStore):
    """See `torch.distributed.Store`, whose C++ callers call these methods by name.

    Every question raises DistStoreError where the controller has not answered within the timeout.

    Args:
        ask: sends a question to the controller and waits for its answer; raises TimeoutError after so many seconds.
    """

    def __init__(self, ask: Callable[[Question, float], Answer]) -> None:
        super().__init__()
        self._ask = ask
        self._timeout = timedelta(seconds=STORE_TIMEOUT_S)

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of every later question."""
        self._timeout = timeout

    def clone(self) -> ControllersStore:
        """Itself: it may be used by several threads at once."""
        return self

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: str | bytes) -> None:
        """Overwrite the value of a key."""
        self._answer(Set(((key, _bytes(value)),)))

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """`set` of several keys, all at once."""
        self._answer(Set(tuple((key, _bytes(value)) for key, value in zip(keys, values, strict=True))))

    def append(self, key: str, value: str | bytes) -> None:
        """Write a value behind that of the key, or as its first."""
        self._answer(Append(key, _bytes(value)))

    def get(self, key: str) -> bytes:
        """Waits until the key is there. Raises DistStoreError after `timeout`."""
        return self._answer(Get((key,)))[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Waits until all are there. Raises DistStoreError after `timeout`."""
        return list(self._answer(Get(tuple(keys))))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all are there. Raises DistStoreError after `timeout`."""
        self._answer(Get(tuple(keys)), timeout)

    def check(self, keys: list[str]) -> bool:
        """Whether all are there, without a wait."""
        return self._answer(Check(tuple(keys)))[0] == b"1"

    def add(self, key: str, value: int) -> int:
        return int(self._answer(Add(key, value))[0])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._answer(CompareSet(key, _bytes(expected_value), _bytes(desired_value)))[0]

    def delete_key(self, key: str) -> bool:
        return self._answer(Delete(key))[0] == b"1"

    def num_keys(self) -> int:
        return int(self._answer(Count())[0])

    def _answer(self, question: Question, timeout: timedelta | None = None) -> Answer:
        seconds = (self._timeout if timeout is None else timeout).total_seconds()
        try:
            return self._ask(question, seconds)
        except TimeoutError:
            raise DistStoreError(f"the store has not answered {question} within {seconds:g} s") from None


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
