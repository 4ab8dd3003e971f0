"""The benchmarks of predictions and of samples that move: their figures by hand, and that they run."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from types import ModuleType

import pytest

from tests.benchmarks.scripts import output_of


@pytest.fixture
def measured(imported: Callable[[str], ModuleType]) -> ModuleType:
    return imported("plans_measured")


def test_kendalls_tau_by_hand(measured: ModuleType) -> None:
    """Three plans: two pairs in the right order and one in the wrong one."""

    def tau(*plans: tuple[float, float]) -> float:
        return measured.kendall(combinations([measured.Beside(*plan) for plan in plans], 2))

    assert tau((1, 1), (2, 3), (3, 2)) == pytest.approx(1 / 3)
    assert tau((1, 1), (2, 2), (3, 3)) == 1.0
    assert tau((1, 2), (2, 1)) == -1.0


def test_plans_are_apart_that_differ_by_more_than_what_was_measured_varies(measured: ModuleType) -> None:
    """Quartiles of 1, 1.1, 1.2, 1.3 (exclusive): 1.025 and 1.275, over the root of four."""
    assert measured.spread([1.1, 1.0, 1.3, 1.2]) == pytest.approx(0.125)
    assert measured.spread([1.1]) == 0.0
    plan, near, far = (measured.Beside(1.0, value, 0.3) for value in (1.25, 1.5, 1.6))
    assert not measured.are_apart(plan, near)
    assert measured.are_apart(plan, far)


def test_a_benchmark_that_is_broken_off_reports_what_it_has(
    measured: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ratios of b are 1.5, 2 and 1.5: 1.5 times the median of a's steps, 2 s. The third plan was not measured."""
    files = {name: Path(name) for name in ("a", "found", "c")}
    predicted = {"a": 1.0, "found": 2.0, "c": 3.0}
    turns = measured.Turns(files, predicted, predicted)
    assert turns.beside() == {}
    measured.report_plans("grpo", turns, left_out=3)
    assert capsys.readouterr().out == ""
    turns.add("found", [2.0, 1.0, 4.0], [3.0, 2.0, 6.0])
    plans = turns.beside()
    assert list(plans) == ["a", "found"]
    assert (plans["a"].measured, plans["found"].measured) == (2.0, 3.0)
    measured.report_plans("grpo", turns, left_out=1)
    told = capsys.readouterr().out
    assert "Kendall tau 1.00; picked `a`, 0.0% from the best" in told
    assert "`plan: auto` finds `found`, 50.0% from the best" in told
    assert "broken off: 1 plans" in told


def test_settings_that_are_broken_off_have_their_means(
    measured: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors of 10 % and -30 % of seconds, of 0 and 50 % of memory."""

    def settings(*rows):
        yield from rows
        raise measured.RunFailed("the next one failed")

    beside = measured.Beside
    rows = [("a", beside(1.1, 1.0), beside(2.0, 2.0)), ("b", beside(0.7, 1.0), beside(3.0, 2.0))]
    for some in ((), rows):
        with pytest.raises(measured.RunFailed):
            measured.report_settings(settings(*some))
        told = capsys.readouterr().out
        means = "step seconds: mean of the errors' sizes 20.0%\npeak memory: mean of the errors' sizes 25.0%\n"
        assert told.endswith(means) is bool(some)
        assert bool(told) is bool(some)


@pytest.mark.process
def test_of_runs_in_turns_that_are_broken_off_no_process_is_left(
    imported: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second ends with 3 before its first step, and the first with it."""
    in_turns = imported("placed.step_by_step")
    processes = []

    def start(job: object, place: Path) -> subprocess.Popen[bytes]:
        place.mkdir()
        program = "raise SystemExit(3)" if processes else "import time; time.sleep(600)"
        (place / ("log" if processes else "ready-1")).touch()
        processes.append(subprocess.Popen([sys.executable, "-c", program]))
        return processes[-1]

    monkeypatch.setattr(in_turns, "start", start)
    with pytest.raises(in_turns.RunFailed, match="ended with 3"):
        in_turns.in_turns([{"steps": 1}] * 2, [tmp_path / "a", tmp_path / "b"], 0)
    assert [process.returncode for process in processes] == [-signal.SIGTERM, 3]


def test_settings_are_the_shipped_recipes(imported: Callable[[str], ModuleType]) -> None:
    """Data, rewards and lengths are the files'; keys of a setting, and those alone, stand in place of theirs."""
    settings = imported("placed.settings")
    demo = settings.read_with("demo", {"prompts_per_step": 8})
    assert (demo["prompts_per_step"], demo["samples_per_prompt"]) == (8, 8)
    assert demo["data"]["source"] == "reasoning_gym:basic_arithmetic"
    assert (demo["reward"]["answer"], demo["sampling"]["max_response_tokens"]) == ("number", 16)
    film = settings.read_with("film", {"sampling.max_response_tokens": 16, "reward.model": "scorer"})
    assert (film["data"]["source"], film["data"]["parameters"]["prompt_words"]) == ("movie_reviews:prompts", 6)
    assert (film["model"], film["reward"]["model"]) == ("smollm2-135m-instruct", ["scorer"])
    assert (film["prompts_per_step"], film["sampling"]["max_response_tokens"]) == (16, 16)
    assert len(settings.SETTINGS) == 8
    assert {setting.devices for setting in settings.SETTINGS.values()} == {1, 2}


def test_samples_spread_evenly_by_hand(imported: Callable[[str], ModuleType]) -> None:
    """Two instances. With slots for all: two steps of two samples on each, one of one, at 1 + n seconds: 8. With one
    slot each: the two short ones, then the long ones, in steps of 2 seconds: 4 + 6. Nobody gives among equals."""
    bench = imported("sample_reallocation")
    curve = imported("step_curves").curve("a core=1:15.4,11:35.4")
    lengths = {0: [2, 3], 1: [2, 3]}
    assert bench.even_s(lengths, 2, lambda n: 1.0 + n, 8) == 8.0
    assert bench.even_s(lengths, 2, lambda n: 1.0 + n, 1) == 10.0
    off, on, even, moved = bench.simulated(lengths, lengths, 2, curve, 8, 2.0)
    assert off == on == pytest.approx(even)
    assert moved == 0
    long = {0: range(93, 101), 1: range(13, 21)}
    off, on, even, moved = bench.simulated(long, long, 2, curve, 8, 2.0)
    assert even <= on < off
    assert moved > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plans_measured.py", "--parts", "settings", "--steps", "1"], "peak memory: mean"),
        *(
            (["plans_measured.py", "--parts", "plans", "--algorithms", name, "--steps", "1"], "`plan: auto` finds")
            for name in ("grpo", "ppo")
        ),
        (["stage_fusion.py", "--distributions", "1", "--steps", "2", "--shares", "0.5", "--tokens", "12"], "ceiling"),
        (["sample_reallocation.py", "--instances", "4", "--distributions", "1", "--tokens", "12"], "lengths 1"),
    ],
)
def test_they_run(arguments: list[str], said: str) -> None:
    script, *options = arguments
    printed = output_of(script, "--tiny", "--repeats", "1", *options)
    assert said in printed
    assert "differ" not in printed
