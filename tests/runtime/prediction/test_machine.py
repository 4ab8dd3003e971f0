"""Threads that a prediction is for are those that the run computes with, and what is said where nothing is measured."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch

from plait.recipes.recipe import Recipe
from plait.runtime.prediction import machine
from plait.runtime.prediction.machine import measured_machine, threads_of
from plait.runtime.process import set_up
from tests.recipes.test_checks import SHAPE


def recipe(threads: int) -> Recipe:
    return Recipe.model_construct(threads=threads)


@pytest.mark.parametrize(("variable", "threads"), [("1", 0), ("3", 0), ("3", 2), (None, 0)])
def test_one_process_is_predicted_with_the_threads_that_it_takes(
    variable: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    try:
        set_up(threads)
        assert torch.get_num_threads() == threads_of(recipe(threads), 1)
    finally:
        torch.set_num_threads(before)


def test_several_share_the_cores_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert [threads_of(recipe(0), devices) for devices in (1, 2, 4, 16)] == [5, 4, 2, 1]
    assert threads_of(recipe(3), 4) == 3


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        (
            "loading model m\nerror: rank 0 did not answer\nrank 0:\n  | torch.mm(rows, weight)\n",
            "rank 0 did not answer",
        ),
        ("Traceback\nValueError: odd\n", "ValueError: odd"),
        ("", "exit code 1"),
    ],
)
def test_why_nothing_was_measured_is_what_the_command_says(
    stderr: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "kept_profiles", lambda *_: [])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", stderr))
    one = Recipe.model_validate({"model": "m", "data": {"source": "d"}, "steps": 1, "run_dir": "r"})
    _, calibration = measured_machine(one, SHAPE, 2)
    assert not calibration.exact
    assert capsys.readouterr().err.endswith(f": `plait profile` failed: {said}\n")
