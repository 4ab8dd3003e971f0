"""A command that does not lead joins the run of the one that does, and serves it to its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from plait.errors import RunError
from plait.launch.nodes.agent import Agent, who
from plait.launch.nodes.gathering import JOIN_S
from plait.launch.nodes.interfaces import interface_of, resolved
from plait.launch.nodes.introduction import Stranger, dialled, introduced
from plait.launch.nodes.messages import Joined
from plait.launch.nodes.place import Attached
from plait.launch.nodes.run_key import FILE, VARIABLE, nodes_key
from plait.launch.wire import Channel
from plait.stop_signals import signals_to

_BETWEEN_TRIES_S = 0.3
SILENT_S = 10.0
"""After which a node says why it has not joined yet: the leader may be as late, and its key that of an earlier run."""


def join(
    attached: Attached,
    folder: Path,
    say: Callable[[str], None],
    *,
    keys: tuple[tuple[str, str], ...] = (),
    files: tuple[tuple[str, str], ...] = (),
    deadline_s: float = JOIN_S,
) -> int:
    """Serve the run of the leader until it ends; the exit code that it gives.

    Args:
        folder: of the run, shared by all nodes: the key is there, where no variable has it.
        keys, files: of the recipe that this command was given, which the leader compares with its own (`Joined`).

    Raises:
        ConfigError: the leader's host is unknown, the key cannot be used, or an address is none of this machine.
        RunError: the leader does not answer in time, or is lost. No rank is left.
    """
    address = (resolved(attached.leader[0]), attached.leader[1])
    stated = None if attached.address is None else resolved(attached.address)
    if stated is not None:
        interface_of(stated)
    say(f"node {attached.node} waits for the leader at {attached.leader[0]}:{attached.leader[1]}")
    channel, key = _met(address, folder, time.monotonic() + deadline_s, say)
    own_address = stated or channel.link.getsockname()[0]
    me = who(attached.task, attached.node, own_address, own_devices=attached.own_devices, keys=keys, files=files)
    return serve(channel, key, me, say)


def serve(
    channel: Channel,
    key: bytes,
    me: Joined,
    say: Callable[[str], None],
    *,
    signals: bool = True,
) -> int:
    """Serve a leader with whom the introductions are made. Raises as `join`.

    Args:
        me: who this is (`agent.who`).
        signals: whether signals to this process ask the leader to stop the run.
    """
    agent = Agent(channel, key, me, say)
    with signals_to(agent.signalled) if signals else nullcontext():
        return agent.serve()


def _met(address: tuple[str, int], folder: Path, deadline: float, say: Callable[[str], None]) -> tuple[Channel, bytes]:
    silent_until = time.monotonic() + SILENT_S
    why = f"there is no key of the run: neither {folder / FILE} nor the variable {VARIABLE}"
    while True:
        key = nodes_key(folder, os.environ)
        if key is not None:
            try:
                return introduced(dialled(address, min(silent_until, deadline)), key)
            except RunError as error:
                why = str(error)
            except Stranger as stranger:  # the key may be that of an earlier run, which the leader will replace
                why = (
                    f"what listens at {address[0]}:{address[1]} is not the leader of this run: {stranger}{_same_key()}"
                )
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise RunError(f"this node could not join: {why}")
        if time.monotonic() >= silent_until:
            silent_until = deadline
            say(f"this node has not joined yet, and tries for {left_s:.0f} s more: {why}")
        time.sleep(_BETWEEN_TRIES_S)


def _same_key() -> str:
    """What to look at where the key is that of the variable."""
    return f"; is {VARIABLE} the same on all nodes?" if VARIABLE in os.environ else ""
