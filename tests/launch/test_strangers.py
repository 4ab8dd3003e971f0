"""What another process of the machine can reach of a running group: no key of its rendezvous, and not its end."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from datetime import timedelta

import pytest

from plait.launch.failures import WorkerError
from plait.launch.local import LocalProcesses
from tests.launch.workers import Storing, Summing

LIMIT_S = 60.0


def listened_on(pids):
    """(address as the kernel writes it, port) of every socket on which these processes listen."""
    inodes = set()
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    found = []
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(file) as table:
            rows = [line.split() for line in table.readlines()[1:]]
        listening = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
        found += [(address, int(port, 16)) for address, _, port in (entry.partition(":") for entry in listening)]
    return found


def test_a_rendezvous_listens_nowhere():
    with LocalProcesses().start(Storing, 2) as group:
        waiting = group.submit(1, "ask", "get", "from 0")
        group.submit(0, "ask", "set", "from 0", "secret").result(LIMIT_S)
        assert waiting.result(LIMIT_S) == b"secret"
        assert listened_on(group.pids) == []
        assert listened_on([os.getpid()]) == []


def test_the_store_waits_counts_and_times_out_between_processes():
    with LocalProcesses().start(Storing, 2) as group:
        assert sorted(group.submit([0, 1], "ask", "add", "n", 3).result(LIMIT_S)) == [3, 6]
        assert group.submit(1, "ask", "get", "n").result(LIMIT_S) == b"6"
        waiting = group.submit(1, "ask", "multi_get", ["x", "y"])
        group.submit(0, "ask", "multi_set", ["x", "y"], ["1", b"\x00\xff"]).result(LIMIT_S)
        assert waiting.result(LIMIT_S) == [b"1", b"\x00\xff"]
        started = time.monotonic()
        with pytest.raises(WorkerError, match=r"within 0\.2 s"):
            group.submit(0, "ask", "wait", ["never"], timedelta(seconds=0.2)).result(LIMIT_S)
        assert time.monotonic() - started < LIMIT_S / 2
        assert group.submit(0, "ask", "check", ["x", "y", "n"]).result(LIMIT_S) is True


def test_who_connects_to_what_the_workers_listen_on_does_not_end_the_group():
    with LocalProcesses().start(Summing, 2) as group:
        addresses = listened_on(group.pids)
        assert {address for address, _ in addresses} <= {"0100007F"}, "loopback only"
        assert addresses, "gloo listens: what it opens is tried below"
        words = [b"", b"\x00" * 8, b"\x01\x00\x00\x00\x00\x00\x00\x00" * 100, os.urandom(4096)]
        with contextlib.ExitStack() as open_ones:
            for _, port in addresses:
                for number, word in enumerate(words):
                    stranger = open_ones.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
                    stranger.sendall(word)
                    if number % 2:
                        stranger.close()
            for value in (1, 2, 3):
                assert group.submit([0, 1], "sum", value).result(LIMIT_S) == [2.0 * value] * 2
        assert group.submit([0, 1], "sum", 4).result(LIMIT_S) == [8.0, 8.0]
