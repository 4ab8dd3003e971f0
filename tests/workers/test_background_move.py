"""A move in a thread of its own: what it ends with is had where it is waited for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch

from plait.errors import RunError
from plait.reallocation.mover import MoveReport
from plait.schedule.work import MOVED_ON, Work
from plait.workers import background_move
from plait.workers.background_move import BackgroundMove

CPU = torch.device("cpu")


def moving(may_end: threading.Event, report: MoveReport | Exception) -> Work[MoveReport]:
    yield MOVED_ON
    may_end.wait(10.0)
    if isinstance(report, Exception):
        raise report
    return report


def test_it_goes_on_by_itself_and_says_when_it_is_through() -> None:
    may_end, report = threading.Event(), MoveReport({}, {})
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


def test_a_fault_of_the_last_moment_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends when its deadline has passed, before anything looks whether it has."""
    may_end = threading.Event()

    class Late(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            assert not may_end.is_set()

        def is_alive(self) -> bool:
            may_end.set()
            super().join(10.0)
            return False

    monkeypatch.setattr(threading, "Thread", Late)
    move = BackgroundMove(moving(may_end, RunError("rank 1 is gone")), "samples", CPU)
    with pytest.raises(RunError, match="rank 1 is gone"):
        move.finish(0.0)


class Stream:
    """In the place of a GPU's stream, which is not through when the thread has asked for all."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda"
        self.said: list[str] = []
        self.is_through = False

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        self.said.append(threading.current_thread().name)
        yield
        self.said.append("asked for all")

    def join(self) -> None:
        self.said.append("stands before what comes")


def test_on_a_gpu_it_is_through_when_its_stream_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Stream] = []
    monkeypatch.setattr(background_move, "Aside", lambda device: made.append(Stream(device)) or made[-1])
    may_end, report = threading.Event(), MoveReport({}, {})
    move = BackgroundMove(moving(may_end, report), "samples", torch.device("cuda", 0))
    may_end.set()
    assert not move.wait(0.05)
    assert not move.is_done
    with pytest.raises(RunError, match=r"to be through within 0\.01 s"):
        move.finish(0.01)
    [stream] = made
    stream.is_through = True
    assert move.finish(10.0) is report
    assert stream.said == ["plait-samples", "asked for all", "stands before what comes"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_it_holds_up_nothing_else() -> None:
    """It reads what was asked for before, and what is asked for behind `finish` reads what it has written."""
    device, report = torch.device("cuda", 0), MoveReport({}, {})
    buffer = torch.ones(4, device=device).mul_(2)

    def slow() -> Work[MoveReport]:
        yield MOVED_ON
        torch.cuda._sleep(1 << 31)  # about a second
        buffer.mul_(3)
        return report

    move = BackgroundMove(slow(), "samples", device)
    assert torch.ones(4, device=device).sum().item() == 4, "this thread's stream is not behind it"
    assert not move.is_done
    assert move.finish(60.0) is report
    assert (buffer + 1).tolist() == [7.0] * 4
