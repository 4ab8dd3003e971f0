"""Code of the user's: one clear error of ours with the user's own lines, whatever it does; never a hang."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from plait import user_code
from plait.errors import FlowError, PlaitError, RunError, UserError
from plait.rewards import loading
from tests.fuzz.user_code import COMPUTED, FINE, LOST, TRACED, in_function, outcome

LIMIT_S = 10.0
"""In which every case has an answer; all of them take milliseconds."""


def said_of(folder: Path, source: str) -> PlaitError:
    begun = time.process_time()
    error = outcome(folder, source)
    assert time.process_time() - begun < LIMIT_S
    assert error is not None, "it must be refused"
    assert "/plait/" not in f"{error}{error.frames}", "no frame of plait's own"
    return error


@pytest.mark.parametrize("case", TRACED)
def test_what_cannot_be_traced_is_refused_before_the_run(tmp_path: Path, case: str) -> None:
    source, said = TRACED[case]
    error = said_of(tmp_path, source)
    assert isinstance(error, UserError), "exit code 2"
    assert said in str(error)


@pytest.mark.parametrize("case", COMPUTED)
def test_functions_over_columns(tmp_path: Path, case: str) -> None:
    source, said = COMPUTED[case]
    error = said_of(tmp_path, source)
    assert isinstance(error, RunError)
    assert str(error).startswith("per_group(judge) -> advantages[sample], prompt 0: "), "by name"
    assert said in str(error)
    assert ("mine.py:11" in str(error)) == case.startswith("in judge"), "the line that raised"


@pytest.mark.parametrize("case", LOST)
def test_losses(tmp_path: Path, case: str) -> None:
    source, said = LOST[case]
    error = said_of(tmp_path, source)
    assert isinstance(error, RunError)
    assert said in str(error)
    assert "the loss `loss`" in str(error) or "batch." in str(error) or "in loss" in error.frames, "by name"


@pytest.mark.parametrize("case", FINE)
def test_what_is_right_works(tmp_path: Path, case: str) -> None:
    error = outcome(tmp_path, FINE[case])
    assert error is None, f"{error}\n{error.frames}"


@pytest.mark.parametrize("swallow", ["", "BaseException"])
def test_a_flow_or_a_file_that_hangs_is_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swallow: str
) -> None:
    monkeypatch.setattr(importlib.import_module("plait.dataflow.trace"), "TRACE_LIMIT_S", 0.2)
    loop = "while True: pass"
    if swallow:
        loop = f"try:\n        while True: pass\n    except {swallow}: pass\n    while True: pass"
    error = said_of(tmp_path, in_function("flow", loop))
    assert isinstance(error, FlowError)
    assert "the flow `flow`: " in str(error)
    assert "has not come back after 0 s" in str(error)
    assert "in flow\n" in error.frames
    sys.modules.pop("plait_user_mine", None)
    monkeypatch.setattr(loading, "IMPORT_LIMIT_S", 0.5)
    error = said_of(tmp_path, "import time\ntime.sleep(1000)\n")
    assert "cannot be loaded" in str(error)
    assert "mine.py:2: has not come back" in str(error)


@pytest.mark.parametrize(
    ("function", "module"), [("judge", "plait.data.computing"), ("loss", "plait.training.mini_batch")]
)
def test_what_hangs_in_a_step_is_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, module: str
) -> None:
    monkeypatch.setattr(importlib.import_module(module), "CALL_LIMIT_S", 0.2)
    error = said_of(tmp_path, in_function(function, "while True: pass"))
    assert isinstance(error, RunError)
    assert "has not come back after 0 s" in str(error)
    assert f"in {function}\n" in error.frames


def test_a_deadline_leaves_anothers_timer_going() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    others = signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with user_code.UserCode("it", RunError, limit_s=30.0):
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 20
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.2
        time.sleep(0.3)
        assert rung, "the other's alarm, by the other's handler"
    finally:
        signal.setitimer(signal.ITIMER_REAL, *others)
        signal.signal(signal.SIGALRM, before)


def test_the_person_at_the_keyboard_is_not_the_code() -> None:
    def interrupted() -> None:
        with user_code.UserCode("it", RunError):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        signal.signal(signal.SIGINT, before)


def test_errors_of_plaits_own_functions_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError), user_code.UserCode("ours", RunError, users=False):
        1 / 0  # noqa: B018
