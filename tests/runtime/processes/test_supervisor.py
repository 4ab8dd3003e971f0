"""What the process that the user started says of threads, and does at signals."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.errors import RESUME, RunError
from plait.launch.failures import Ended, Failure, WorkerError
from plait.runtime.folder.directory import RunDirectory
from plait.runtime.folder.run_files import OLD_WORKERS
from plait.runtime.processes import forwarded_signals
from plait.runtime.processes.launching import as_alone, crowding, still_loading
from plait.runtime.processes.supervisor import explained, how_to_resume
from plait.runtime.processes.worker_output import worker_output


def test_more_threads_than_cores_are_said() -> None:
    assert crowding(2, 4, 8) == ""
    assert crowding(3, 1, 2).startswith("3 processes with 1 thread each share 2 cores")


def test_only_a_run_that_has_begun_is_to_be_resumed(tmp_path: Path) -> None:
    """Nor is the one that it was to replace."""
    job: Any = SimpleNamespace(run_dir=tmp_path, recipe=SimpleNamespace(checkpoint=SimpleNamespace(keep_last=1)))
    for _ in range(2):
        with RunDirectory.claim(tmp_path, overwrite=True) as directory:
            assert how_to_resume(job, directory) == "no step is saved; begin the run again"
            RunDirectory.lent(tmp_path).begin("model: m\n")
            again = f"no step is saved; {RESUME} begins again at step 1, also by other keys"
            assert how_to_resume(job, directory) == again
            assert directory.begun


def failed_on(rank: int, cause: RunError) -> WorkerError:
    error = WorkerError(
        Failure(Ended.RAISED, rank, "run", 1.0, "raised", traceback='  File "plait/training/trainer.py"')
    )
    error.__cause__ = cause
    return error


def test_what_the_users_code_raises_is_told_with_its_own_lines_on_any_rank(tmp_path: Path) -> None:
    """As one process tells it: where ranks waited, and plait's own lines, say nothing of it."""
    job: Any = SimpleNamespace(run_dir=tmp_path, recipe=SimpleNamespace(checkpoint=SimpleNamespace(keep_last=1)))
    cause = RunError("the loss `mine`: own.py:4: NameError: no")
    cause.frames = '  File "own.py", line 4, in mine'
    status = tmp_path / "status"
    with RunDirectory.claim(tmp_path / "run") as directory:
        told = explained(failed_on(1, cause), job, directory, status)
        assert str(told) == f"{cause} (on rank 1); no step is saved; begin the run again"
        assert isinstance(told, RunError)
        assert told.frames == cause.frames
        assert explained(failed_on(0, cause), job, directory, status) is cause
        ours = explained(failed_on(1, RunError("rank 1 expected a sign")), job, directory, status)
        assert "plait/training/trainer.py" in str(ours), "of ours all is told"


def test_a_rank_that_leads_itself_tells_its_error_as_one_process_does() -> None:
    cause = RunError("sample 3.0: expected finite logits")
    assert as_alone(failed_on(1, cause), peers=False) is cause
    assert as_alone(failed_on(0, cause)) is cause
    assert "plait/training/trainer.py" in str(as_alone(failed_on(1, cause)))


def test_what_ranks_have_printed_is_replaced_when_another_run_begins(tmp_path: Path) -> None:
    """By hand: what is there after starts that begin, do not, or are killed before they do."""
    log = tmp_path / "workers/rank0.log"

    def start(text: str, *, begins: bool = False, resume: bool = False) -> None:
        claim = RunDirectory.resume(tmp_path) if resume else RunDirectory.claim(tmp_path, overwrite=True)
        with claim as directory, worker_output(directory, resume=resume), open(log, "a") as output:
            output.write(text)
            if begins:
                RunDirectory.lent(tmp_path).begin(f"model: {text}\n")

    start("one ", begins=True)
    start("refused ")
    start("resumed ", resume=True)
    assert log.read_text() == "one resumed "
    log.parent.rename(tmp_path / OLD_WORKERS)
    log.parent.mkdir()
    log.write_text("of a start that was killed")
    start("again", resume=True)
    assert log.read_text() == "one resumed again"
    start("two", begins=True)
    assert [log.read_text(), (tmp_path / OLD_WORKERS).exists()] == ["two", False]
    with RunDirectory.claim(tmp_path, overwrite=True) as directory:
        directory.begin("model: on one device\n")
    assert not log.parent.exists()


def test_the_timer_of_a_second_signal_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarded_signals, "LEAVE_S", 0.1)
    with subprocess.Popen(["sleep", "60"]) as leader:
        group: Any = SimpleNamespace(signal=lambda rank, number: leader.send_signal(number))
        with forwarded_signals.forwarding_signals(group) as signals:
            assert not signals.asked
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
    assert signals.asked
    time.sleep(0.4)  # would be interrupted


@pytest.mark.parametrize(
    ("actions", "said"),
    [
        ([], ""),
        (["actor.generate/s0", "", "serve"], ""),
        (["load models", "load models"], ""),
        (["actor.generate/s0", "load models", ""], "rank 1 still loads models; what needs them waits"),
        (
            ["wait", *["load models"] * 10],
            "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 2 more still load models; what needs them waits",
        ),
    ],
)
def test_ranks_are_named_for_which_a_leader_waits_that_has_its_models(actions: list[str], said: str) -> None:
    assert still_loading(actions) == said
