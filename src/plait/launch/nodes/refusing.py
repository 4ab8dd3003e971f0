"""A leader that refuses its run before it listens tells the other commands so, which else wait for it in vain."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from plait.errors import UserError
from plait.launch.nodes.agent import who
from plait.launch.nodes.gathering import NodeRendezvous
from plait.launch.nodes.interfaces import resolved
from plait.launch.nodes.introduction import listening
from plait.launch.nodes.place import Attached
from plait.launch.nodes.run_key import leaders_key

TELLS_S = 15.0
"""How long the others are waited for: about as long as one command may begin after another."""


@contextmanager
def refusals_told(attached: Attached | None, folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """A UserError inside ends the other commands of the run as well, as far as they come.

    Args:
        attached: the part of this command in a run of several; of one that does not lead, and of a run without others,
            nothing is told.
        folder: of the run, where the key is.
    """
    try:
        yield
    except UserError as error:
        if attached is not None and attached.leads and attached.tasks > 1:
            say(f"the run is refused; its other commands are told why, for {TELLS_S:g} s at most")
            with suppress(UserError, OSError):  # what it is refused for is said all the same
                _tell(attached, folder, error)
        raise


def _tell(attached: Attached, folder: Path, error: UserError) -> None:
    address = resolved(attached.leader[0])
    with listening(address, attached.leader[1]) as listener, _there(folder), leaders_key(folder, os.environ) as key:
        me = who(0, 0, address, own_devices=attached.own_devices)
        NodeRendezvous(listener, key, range(1, attached.tasks), me).refuse(error, TELLS_S)


@contextmanager
def _there(folder: Path) -> Iterator[None]:
    """The folder is there inside, and afterwards if it was before."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if made:
            with suppress(OSError):
                folder.rmdir()
