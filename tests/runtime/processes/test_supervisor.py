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

from plait.errors import RESUME
from plait.runtime.processes import supervisor
from plait.runtime.processes.supervisor import crowding, still_loading, way_on


def test_more_threads_than_cores_are_said() -> None:
    assert crowding(2, 4, 8) == ""
    assert crowding(3, 1, 2).startswith("3 processes with 1 thread each share 2 cores")


def test_only_a_run_that_has_begun_is_to_be_resumed(tmp_path: Path) -> None:
    job: Any = SimpleNamespace(run_dir=tmp_path, recipe=SimpleNamespace(checkpoint=SimpleNamespace(keep_last=1)))
    assert way_on(job) == "no step is saved; begin the run again"
    (tmp_path / "recipe.yaml").touch()
    assert way_on(job) == f"no step is saved; {RESUME} begins again at step 1"


def test_the_timer_of_a_second_signal_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LEAVE_S", 0.1)
    with subprocess.Popen(["sleep", "60"]) as leader:
        group: Any = SimpleNamespace(signal=lambda rank, number: leader.send_signal(number))
        with supervisor.handing_on_signals(group):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
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
