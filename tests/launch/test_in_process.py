"""What is particular to the embedded rank."""

from __future__ import annotations

import os

import pytest

from plait.errors import LayoutError
from plait.launch.in_process import InProcess
from tests.launch.workers import Echo


def test_one_rank_only():
    with pytest.raises(LayoutError, match="has one rank, asked for 2"):
        InProcess().start(Echo, 2)


def test_it_runs_here_when_submitted_and_copies_nothing():
    with InProcess().start(Echo, 1) as group:
        assert group.pids == (os.getpid(),)
        item = [1]
        handle = group.submit(0, "append", item)
        assert handle.done
        assert group.submit(0, "read_log").result(0.0)[0] is item
