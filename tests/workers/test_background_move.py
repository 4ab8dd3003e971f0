"""A move in a thread of its own: what it ends with is had where it is waited for."""

from __future__ import annotations

import threading

import pytest
import torch

from plait.errors import RunError
from plait.reallocation.mover import MoveReport
from plait.schedule.work import MOVED_ON, Work
from plait.workers.background_move import BackgroundMove


CPU = torch.device("cpu")


def moving(may_end: threading.Event, report: MoveReport | Exception) -> Work[MoveReport]:
    yield MOVED_ON
    may_end.wait(10.0)
    if isinstance(report, Exception):
        raise report
    return report


def test_it_goes_on_by_itself_and_says_when_it_is_through() -> None:
    may_end, report = threading.Event(), MoveReport(0, {}, {}, 0, (), 0)
    move = BackgroundMove(moving(may_end, report), "samples", CPU)
    assert not move.is_done
    with pytest.raises(RunError, match=r"samples: expected what goes ahead to be through within 0\.01 s"):
        move.finish(0.01)
    may_end.set()
    assert move.finish(10.0) is report
    assert move.is_done


def test_a_fault_is_raised_where_it_is_waited_for() -> None:
    may_end, fault = threading.Event(), RunError("rank 1 is gone")
    move = BackgroundMove(moving(may_end, fault), "samples", CPU)
    may_end.set()
    with pytest.raises(RunError, match="rank 1 is gone"):
        move.finish(10.0)
    assert move.is_done
