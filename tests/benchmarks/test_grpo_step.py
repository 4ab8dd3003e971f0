"""The benchmark against TRL: it runs, and it notices a side that did other work than was asked."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.benchmarks.scripts import output_of


@pytest.fixture
def grpo_step(imported: Callable[[str], ModuleType]) -> ModuleType:
    return imported("grpo_step")


class FakeSide:
    """A side that answers at once; `trl` says one token too few in step 1."""

    def __init__(self, name, workload_file, threads, log_file, *, module) -> None:
        from grpo.measure import PHASES, Ready, Seconds, StepReport
        from grpo.workload import Workload

        work = Workload.load(workload_file)
        self.name = name
        self.steps = []
        self.ready = Ready(imported_bytes=10_000_000, loaded_bytes=20_000_000)
        lengths = list(work.wanted_response_lengths)
        short = [lengths[0] - 1, *lengths[1:]]
        self._answers = [
            StepReport(
                {phase: Seconds(wall=2.0 * (1 + (name == "trl")), cpu=1.0) for phase in PHASES},
                work.wanted_prompt_lengths,
                short if name == "trl" and number == 1 else lengths,
                scored_tokens=5,
                trained_tokens=6,
                max_rss_bytes=30_000_000,
            )
            for number in range(work.num_steps)
        ]

    def step(self):
        self.steps.append(self._answers[len(self.steps)])
        return self.steps[-1]

    def close(self) -> None:
        pass


@pytest.fixture
def faked(grpo_step: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    def workload(folder: Path, *, num_prompts: int, samples_per_prompt: int, threads: int, num_steps: int, device: str):
        lengths = tuple(tuple(3 + i for i in range(samples_per_prompt)) for _ in range(num_prompts))
        ids = ((7, 8),) * num_prompts
        return grpo_step.Workload(
            "fake", "nowhere", "float32", threads, device, num_steps, 9, ("a b",) * num_prompts, ids, lengths
        )

    monkeypatch.setattr(grpo_step, "tiny", workload)
    monkeypatch.setattr(grpo_step, "Side", FakeSide)
    return grpo_step


def test_other_tokens_than_the_list_fail(faked: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert faked.main(["--tiny", "--prompts", "1", "--samples-per-prompt", "2", "--repeats", "1"]) == 1
    assert "trl, step 1: expected response lengths [3, 4], found [2, 4]" in capsys.readouterr().err


def test_a_side_alone_that_does_the_list_passes(faked: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert faked.main(["--tiny", "--prompts", "1", "--samples-per-prompt", "2", "--sides", "plait"]) == 0
    rows = {line[:26].strip(): line[26:].split() for line in capsys.readouterr().out.splitlines()}
    assert rows["whole step"] == ["10.00", "(5.00)"]
    assert rows["prompt tokens"] == ["4"]
    assert rows["response tokens"] == ["7"]
    assert rows["of these above imports"] == ["20", "MB"]


def test_ratio_is_second_side_to_first(faked: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    faked.main(["--tiny", "--repeats", "2"])
    rows = {line[:26].strip(): line[26:].split() for line in capsys.readouterr().out.splitlines()}
    assert rows["whole step"] == ["10.00", "(5.00)", "20.00", "(5.00)", "2.00", "(1.00)"]


def test_unknown_side_is_refused(grpo_step: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert grpo_step.main(["--sides", "plait,verl"]) == 2
    assert "--sides: expected some of plait,trl, found plait,verl" in capsys.readouterr().err


def test_stopwatch_charges_the_innermost_phase(grpo_step: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = importlib.import_module("grpo.measure")
    now = 0.0
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
    watch = measure.Stopwatch()
    watch.restart()
    now = 1.0  # 1 s of other
    watch.enter("training")
    now = 3.0  # 2 s of training
    with watch.phase("generation"):
        now = 7.0  # 4 s of generation
    now = 15.0  # 8 s of what turns out to be the optimizer's
    watch.leave("optimizer")
    now = 31.0  # 16 s of other
    wall = {name: seconds.wall for name, seconds in watch.stop().items()}
    assert wall == {"other": 17.0, "training": 2.0, "generation": 4.0, "optimizer": 8.0, "reference": 0.0}


def test_response_lengths_of_the_full_workload(grpo_step: ModuleType) -> None:
    workload = importlib.import_module("grpo.workload")
    lengths = sorted(n for group in workload.drawn_lengths(200, 8, median=32, cap=128) for n in group)
    assert lengths[0] >= 1
    assert lengths[-1] == 128
    assert 30 <= lengths[len(lengths) // 2] <= 34
    again = workload.drawn_lengths(200, 8, median=32, cap=128)
    assert sorted(n for group in again for n in group) == lengths


@pytest.mark.slow  # TRL's import takes long
def test_tiny_run_of_both_sides() -> None:
    printed = output_of("grpo_step.py", "--tiny", "--repeats", "1")
    rows = {line[:26].strip(): line[26:].split() for line in printed.splitlines()}
    assert rows["response tokens"][0] == rows["response tokens"][1]
    assert rows["prompt tokens"] == ["512", "512"]
    # plait computes a group's prompt once and no padding: 8 prompts x 16 tokens, and the responses.
    assert int(rows["positions trained"][0]) == 128 + int(rows["response tokens"][0])
    assert int(rows["positions trained"][1]) > int(rows["positions trained"][0])
