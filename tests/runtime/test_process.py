"""What a run finds in a process that has done other things with torch, and what it leaves behind."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from plait.errors import ConfigError
from plait.runtime import process
from plait.runtime.process import as_in_new_process


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def state() -> tuple[object, ...]:
    """All that torch computes by, and does not take as an argument."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    return *modes, torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()


@pytest.mark.parametrize(
    "asked",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: default_dtype(torch.bfloat16),
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
    ],
    ids=("no gradients", "inference mode", "bfloat16 by default", "autocast", "another device"),
)
def test_a_run_computes_as_in_a_new_process(asked: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
    """Numbers in bfloat16 by default made other losses than the recipe's; without gradients the loss was blamed."""
    threads = torch.get_num_threads()
    with asked():
        before = state()
        with as_in_new_process(threads + 1):
            assert state() == (True, False, False, torch.float32, torch.device("cpu"), threads + 1)
            torch.set_grad_enabled(False)  # as a loss might
            torch.set_default_dtype(torch.float64)
        assert state() == before


class Circle:
    """What only the garbage collector frees, as models whose layers have a forward of ours."""

    def __init__(self) -> None:
        self.own = self


def test_what_a_run_has_held_is_free_when_it_has_ended_and_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run in a notebook, or the next stage, had the models of the first beside its own."""
    monkeypatch.setattr(process, "LARGE_BYTES", 0)
    gc.disable()
    try:
        with as_in_new_process(1):
            ended = weakref.ref(Circle())
        assert ended() is None
        failed = weakref.ref(Circle())
        with as_in_new_process(1):
            assert failed() is None
    finally:
        gc.enable()


def test_a_process_computes_one_run_at_a_time() -> None:
    """Two in threads read half of each other's models."""
    refused: list[ConfigError] = []

    def another() -> None:
        try:
            with as_in_new_process(1):
                pass
        except ConfigError as error:
            refused.append(error)

    def in_a_thread() -> None:
        thread = threading.Thread(target=another)
        thread.start()
        thread.join()

    def interrupted() -> None:
        with as_in_new_process(1):
            in_a_thread()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    in_a_thread()
    assert [str(error)[:38] for error in refused] == ["another run goes on in this process (i"]
