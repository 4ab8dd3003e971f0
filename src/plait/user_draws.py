"""Random numbers that the user's own code draws: from `random`, and where they have been imported from NumPy's global
generator and torch's.

Imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

LIBRARIES = ("numpy", "torch")
"""With random state of their own, besides the standard library."""


def seed_all(noise: str) -> None:
    """Make what is drawn from here on a function of `noise`."""
    random.seed(noise)
    for name in LIBRARIES:
        if name in sys.modules:
            seed_library(name, noise)


def seed_library(name: str, noise: str) -> None:
    """`seed_all` for one of LIBRARIES, which has been imported."""
    library = sys.modules[name]
    number = int.from_bytes(hashlib.blake2b(noise.encode(), digest_size=4).digest(), "little")
    if name == "numpy":
        library.random.seed(number)
    else:
        library.manual_seed(number)


def draws_now() -> tuple[Any, ...]:
    """The random state, for `draw_from`."""
    numpy, torch = (sys.modules.get(name) for name in LIBRARIES)
    of_numpy = None if numpy is None else numpy.random.get_state()
    return random.getstate(), of_numpy, None if torch is None else torch.random.get_rng_state()


def draw_from(state: tuple[Any, ...]) -> None:
    """What is drawn next is what would have been drawn then."""
    of_python, of_numpy, of_torch = state
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)
    if of_torch is not None:
        sys.modules["torch"].random.set_rng_state(of_torch)


@contextlib.contextmanager
def drawing(noise: str) -> Iterator[None]:
    """While inside, what is drawn is a function of `noise`: on every rank, and after a resume."""
    with draws_kept():
        seed_all(noise)
        yield


@contextlib.contextmanager
def draws_kept() -> Iterator[None]:
    """Behind it, what is drawn next is what would have been drawn without what is inside."""
    numpy, torch = (sys.modules.get(name) for name in LIBRARIES)
    of_python, of_numpy = random.getstate(), None if numpy is None else numpy.random.get_state()
    with contextlib.ExitStack() as stack:
        if torch is not None:
            devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
            stack.enter_context(torch.random.fork_rng(devices))
        stack.callback(random.setstate, of_python)
        if numpy is not None:
            stack.callback(numpy.random.set_state, of_numpy)
        yield
