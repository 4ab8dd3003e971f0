"""A clock in place of the module `time`."""

from __future__ import annotations

from types import ModuleType
from typing import Self

import pytest


class HandClock:
    """Stands still until it is moved."""

    now_s = 100.0

    @classmethod
    def of(cls, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Self:
        """That by which a module tells the time, as long as a test runs."""
        hand = cls()
        monkeypatch.setattr(module, "time", hand)
        return hand

    def monotonic(self) -> float:
        return self.now_s
