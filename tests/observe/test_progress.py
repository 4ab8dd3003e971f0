import io
import os
import pty
import re
import sys

import pytest

from plait.observe.progress import Progress, Watched, clock_text

WATCHED = (
    Watched("reward", ("reward",), ".3f"),
    Watched("kl", ("kl",), ".4f"),
    Watched("eval accuracy", ("eval/accuracy",), ".1%"),
    Watched("length", ("response_length/mean",), ".1f"),
    Watched("tok/s", ("perf/throughput",), ",.0f"),
)
METRICS = {
    "reward": 0.5,
    "kl": 0.00125,
    "response_length/mean": 34.25,
    "perf/throughput": 1234.5,
    "timing_s/gen": 3.0,
    "timing_s/update_actor": 1.5,
    "timing_s/step": 4.6,
}


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def plain_text(output: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output)


def test_what_is_no_stage_is_named_and_what_comes_once_is_not_expected_again():
    clock, stream = Clock(), io.StringIO()
    with Progress(3, stream=stream, clock=clock) as progress:
        progress.start()
        clock.now_s += 128.5
        progress.step_done(1, METRICS, {"first evaluation": 124.0, "saving": 0.01, "compiling": 115.0}, 124.0)
        clock.now_s += 7.5
        progress.step_done(2, METRICS, {"saving": 3.0, "compiling": 0.0}, 0.0)
    stages = "gen 3.0, update_actor 1.5"
    assert stream.getvalue().splitlines() == [
        # 2 steps of 128.5 - 124 s, then 1 of (4.5 + 7.5) / 2 s
        f"step 1/3  128.5 s ({stages}, first evaluation 124.0; of it compiling 115.0)  left 0:09",
        f"step 2/3  7.5 s ({stages}, saving 3.0)  left 0:06",
    ]


def test_without_a_terminal_a_step_is_one_line():
    clock, stream = Clock(), io.StringIO()
    with Progress(10, watched=WATCHED, stream=stream, clock=clock) as progress:
        progress.start()
        progress.phase("generate", 8, "samples")
        clock.now_s += 3
        progress.advance(8)
        clock.now_s += 2
        progress.step_done(1, METRICS)
        progress.message("saved step 1")
        clock.now_s += 7
        progress.step_done(2, {"reward": float("nan")})
    assert stream.getvalue().splitlines() == [
        # 9 steps of 5 s are left after the first; 8 of (5 + 7) / 2 s after the second
        "step 1/10  reward 0.500  kl 0.0013  length 34.2  tok/s 1,234  5.0 s (gen 3.0, update_actor 1.5)  left 0:45",
        "saved step 1",
        "step 2/10  reward nan  7.0 s (no stage times)  left 0:48",
    ]


@pytest.mark.parametrize("live", [False, True])
def test_it_outlives_its_terminal(monkeypatch, live):
    terminal, end = pty.openpty()
    with open(end, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress(10, watched=WATCHED, live=live) as progress:
            progress.start()
            progress.message("before")
            said = b""
            while b"before" not in said:
                said += os.read(terminal, 4096)
            os.close(terminal)
            progress.step_done(1, METRICS)
            progress.message("after")
        stream.write("nor does what others write there fail from then on")


def test_time_left_counts_what_the_running_step_has_taken():
    clock = Clock()
    progress = Progress(6, stream=io.StringIO(), clock=clock)
    progress.start(steps_done=2)
    assert progress.left_s is None
    clock.now_s += 10
    progress.step_done(3, {})
    assert progress.left_s == 30
    clock.now_s += 4
    assert progress.left_s == 26
    clock.now_s += 100
    assert progress.left_s == 20, "a slow step is no reason to promise less than the steps after it"
    for step in (4, 5, 6):
        progress.step_done(step, {})
    assert progress.left_s == 0


def test_the_terminal_shows_run_phase_numbers_and_stages():
    clock, stream = Clock(), io.StringIO()
    with Progress(10, watched=WATCHED, stream=stream, live=True, clock=clock) as progress:
        progress.start(steps_done=3)
        clock.now_s += 20
        progress.step_done(4, METRICS)
        clock.now_s += 2
        progress.phase("generate", 64, "samples")
        clock.now_s += 2
        progress.advance(17)
        progress.message("a line [that] stays")
    shown = plain_text(stream.getvalue())
    for text in ("3/10 steps", "4/10 steps", "left 1:56", "generate", "17/64 samples", "a line [that] stays"):
        assert text in shown, text
    for text in ("reward", "0.500", "0.0013", "34.2", "1,234", "gen 3.0, update_actor 1.5"):
        assert text in shown, text
    assert stream.getvalue().rstrip().endswith("\x1b[?25h"), "the cursor is given back"


def test_at_most_four_redraws_in_any_second(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    drawn: list[float] = []
    picture = Progress.picture
    progress = Progress(1000, watched=WATCHED, stream=io.StringIO(), live=True, clock=clock)
    with progress:
        progress.start()
        monkeypatch.setattr(Progress, "picture", lambda self: drawn.append(clock.now_s) or picture(self))
        for step in range(1, 400):
            progress.phase("generate" if step % 2 else "train", 8, "samples")
            progress.advance()
            clock.now_s += 0.01
            progress.step_done(step, METRICS)
        monkeypatch.undo()
    assert 12 <= len(drawn) <= 17, "4 s of steps"
    assert all(later - earlier >= 0.999 for earlier, later in zip(drawn, drawn[4:], strict=False))


def test_a_new_phase_is_shown_at_once():
    clock, stream = Clock(), io.StringIO()
    with Progress(2, stream=stream, live=True, clock=clock) as progress:
        progress.start()
        clock.now_s += 1
        progress.phase("generate", 2, "samples")
        clock.now_s += 0.05
        progress.phase("train", 4, "micro-batches")
        assert "0/4 micro-batches" in plain_text(stream.getvalue())


def test_without_steps_only_the_phase_is_shown():
    clock, stream = Clock(), io.StringIO()
    with Progress(0, stream=stream, live=True, clock=clock) as progress:
        progress.start()
        progress.phase("evaluate", 200, "items")
        clock.now_s += 65
        progress.advance(12)
    shown = plain_text(stream.getvalue())
    assert "12/200 items  1:05" in shown
    assert "steps" not in shown


def test_the_first_name_that_a_step_has_is_shown():
    accuracy = Watched("accuracy", ("rewards/accuracies", "reward/accuracy"), ".1%")
    assert accuracy.text({"reward/accuracy": 0.625}) == "62.5%"
    assert accuracy.text({"reward/accuracy": 0.625, "rewards/accuracies": 0.5}) == "50.0%"
    assert accuracy.text({"reward": 1.0}) is None


def test_the_terminal_has_a_column_for_what_a_step_has_had():
    """Also of steps that lack it, such as those between two evaluations; none for what the run does not have."""
    clock, stream = Clock(), io.StringIO()
    with Progress(3, watched=WATCHED, stream=stream, live=True, clock=clock) as progress:
        progress.start()
        for step, metrics in enumerate(({"reward": 0.5}, {"reward": 0.75, "eval/accuracy": 0.125}, {"reward": 1.0}), 1):
            clock.now_s += 2
            progress.step_done(step, metrics)
    lines = plain_text(stream.getvalue()).replace("\r", "\n").splitlines()
    head = max(place for place, line in enumerate(lines) if "seconds" in line)
    rows = [line.split() for line in lines[head:]]
    assert rows[0] == ["step", "reward", "eval", "accuracy", "seconds"]
    assert rows[1:4] == [["1", "0.500", "-", "2.0"], ["2", "0.750", "12.5%", "2.0"], ["3", "1.000", "-", "2.0"]]


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (75.9, "1:15"), (3599, "59:59"), (4000, "1:06:40")])
def test_clock_text(seconds: float, text: str):
    assert clock_text(seconds) == text


def test_stop_may_be_called_twice_and_before_start():
    progress = Progress(1, stream=io.StringIO(), live=True)
    progress.stop()
    progress.start()
    progress.stop()
    progress.stop()


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_the_display_fits_its_terminal(columns: int, monkeypatch: pytest.MonkeyPatch):
    """What is watched first stays whole; bars and the last columns go."""
    monkeypatch.setenv("COLUMNS", str(columns))
    clock, stream = Clock(), io.StringIO()
    with Progress(1000, watched=WATCHED, stream=stream, live=True, clock=clock) as progress:
        progress.start(steps_done=98)
        clock.now_s += 4000
        progress.step_done(99, METRICS)
        clock.now_s += 2
        progress.phase("generate", 128, "samples")
        progress.advance(64)
    lines = plain_text(stream.getvalue()).replace("\r", "\n").splitlines()
    assert max(len(line.rstrip()) for line in lines) <= columns
    shown = "\n".join(lines)
    for text in ("99/1000 steps", "reward", "0.500", "0.0013"):
        assert text in shown, text
    assert ("━" in shown) == (columns > 40)
    assert "0/128 samples" in shown
    assert "…" not in shown
