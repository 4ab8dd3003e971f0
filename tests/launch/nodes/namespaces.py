"""Two machines made of network namespaces, joined by a link of limited bandwidth; skips where these may not be made."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip())


def inside(name: str, *command: str) -> list[str]:
    """A command that runs another on one of the machines."""
    return ["ip", "netns", "exec", name, *command]


@contextlib.contextmanager
def two_machines() -> Iterator[list[str]]:
    """Their names; their link has ADDRESSES, 200 Mbit/s and 5 ms, by `plv0` of the first and `plv1` of the second."""
    names = [f"plait{os.getpid()}{side}" for side in "ab"]
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True)
                ip("-n", name, "link", "set", "lo", "up")
            ip("link", "add", "plv0", "netns", names[0], "type", "veth", "peer", "name", "plv1", "netns", names[1])
            for number, name in enumerate(names):
                ip("-n", name, "addr", "add", f"{ADDRESSES[number]}/24", "dev", f"plv{number}")
                ip("-n", name, "link", "set", f"plv{number}", "up")
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        for number, name in enumerate(names):  # not every kernel can
            slow = ("tc", "qdisc", "add", "dev", f"plv{number}", "root", "netem", "delay", "2500us", "rate", "200mbit")
            subprocess.run(inside(name, *slow), capture_output=True)
        yield names


def cut(names: list[str]) -> None:
    """Nothing passes the link any longer."""
    ip("-n", names[1], "link", "set", "plv1", "down")


def received_bytes(name: str, number: int) -> int:
    """By the machine of that number, over the link, headers included."""
    file = f"/sys/class/net/plv{number}/statistics/rx_bytes"
    return int(subprocess.run(inside(name, "cat", file), capture_output=True, text=True, check=True).stdout)


def processes_of(name: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    return [int(word) for word in done.stdout.split()]


def listening_in(name: str) -> set[str]:
    """Addresses on which anything on a machine listens, as the kernel writes them."""
    found = set()
    for file in ("tcp", "tcp6"):
        text = subprocess.run(inside(name, "cat", f"/proc/net/{file}"), capture_output=True, text=True).stdout
        rows = [line.split() for line in text.splitlines()[1:]]
        found |= {row[1].partition(":")[0] for row in rows if row[3] == "0A"}
    return found


@pytest.fixture
def machines() -> Iterator[list[str]]:
    with two_machines() as names:
        yield names
