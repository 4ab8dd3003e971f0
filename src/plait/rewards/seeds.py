"""Random numbers of reward functions: seeded for every call, in each library that has been imported."""

from __future__ import annotations

import importlib.abc
import random
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from plait.user_draws import LIBRARIES, draw_from, draws_now, seed_all, seed_library


class Seeds(importlib.abc.MetaPathFinder):
    """The random state of a call, a function of its noise alone: whichever worker makes it, whatever went before, and
    after a resume. It covers `random`, NumPy's global generator and torch's, each from the moment when it is there: a
    library that the function itself imports is seeded when its import ends. While the functions' files are imported the
    state is a fixed one. A generator of the user's own is not covered, nor is what `numpy.random.default_rng()` draws
    from the system.
    """

    def __init__(self) -> None:
        self.drawing: CallDraws | None = None
        """The call whose random state it is, where several are under way."""
        sys.meta_path.insert(0, self)
        self.seed("import")

    def seed(self, noise: str) -> None:
        self._noise, self.drawing = noise, None
        seed_all(noise)

    def of_call(self, noise: str) -> CallDraws:
        """For a call that is under way with others."""
        return CallDraws(self, noise)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in LIBRARIES:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_seed(module: ModuleType) -> None:
            state = random.getstate()
            execute(module)
            random.setstate(state)  # whatever the import drew, only the first call would have drawn it
            seed_library(fullname, self._noise)

        spec.loader.exec_module = execute_and_seed
        return spec


class CallDraws:
    """The random state of one of several calls that are under way together: it draws what it would alone."""

    def __init__(self, seeds: Seeds, noise: str) -> None:
        self._seeds, self._noise = seeds, noise
        self._state: tuple[Any, ...] | None = None
        """When another call went on; None: nothing was drawn."""

    def resume(self) -> None:
        """From now on this call draws."""
        before = self._seeds.drawing
        if before is self:
            return
        if before is not None:
            before._state = draws_now()
        self._seeds.seed(self._noise)
        self._seeds.drawing = self
        if self._state is not None:
            draw_from(self._state)
