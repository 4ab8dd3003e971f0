"""`plait schedule` and `plait trace`, as a user calls them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from plait.cli import main
from plait.observe.trace import read_trace
from plait.planner.exact import available
from plait.schedule.schedule import Schedule
from plait.schedule.timeline import Timeline
from tests.cli.printed import run

SMALL = ["schedule", "--stages", "4,2", "--microbatches", "4,2", "--forward", "2,2", "--memory", "2,1"]


def test_the_report_has_everything_a_person_asks_for(capsys, tmp_path):
    code, out, _ = run(capsys, *SMALL, "--seconds", 2, "--out", tmp_path / "s.json", "--picture", tmp_path / "p.svg")
    assert code == 0
    for words in ("makespan", "lower bound", "bubbles", "peak memory", "1F1B-serial", "1F1B-opposite", "greedy"):
        assert words in out
    assert "data-parallel ideal" in out
    assert out.count("rank") >= 5
    assert Schedule.load(tmp_path / "s.json").num_ranks == 4
    assert (tmp_path / "p.svg").read_text().startswith("<svg")


def test_json_for_programs(capsys):
    code, out, _ = run(capsys, *SMALL, "--seconds", 2, "--json")
    record = json.loads(out)
    assert code == 0
    assert {"makespan", "lower_bound", "peak_memory", "baselines", "seconds", "actions"} <= record.keys()
    assert record["makespan"] >= record["lower_bound"]
    assert len(record["peak_memory"]) == len(record["actions"]) == 4
    assert [len(row) for row in record["actions"]] == [12, 12, 12, 12]
    assert record["actions"][0][0] in ("actor:0F0", "critic:1F0")
    assert record["baselines"]["data-parallel ideal"] == 36


@pytest.mark.parametrize("engine", ["greedy", "1f1b", "gpipe", "exact"])
def test_engines(capsys, engine):
    if engine == "exact" and not available():
        pytest.skip("OR-Tools is not installed")
    code, out, _ = run(capsys, *SMALL, "--engine", engine, "--seconds", 3, "--json")
    assert code == 0
    assert json.loads(out)["makespan"] >= 42


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--stages", "8,3", "--microbatches", "4,2"], "--stages: expected 8/3 to be a whole number of copies"),
        (["--stages", "4,x", "--microbatches", "4,2"], "--stages: expected whole numbers such as 8,4, found '4,x'"),
        (["--stages", "4,2", "--microbatches", "4"], "--microbatches: expected 2 values"),
        (["--stages", "4,2", "--microbatches", "4,2", "--forward", "1,y"], "--forward: expected a number, found 'y'"),
        (["--stages", "4,2", "--microbatches", "4,2", "--forward", "1:2,1"], "--forward: expected one value or 4"),
        (["--stages", "4,2", "--microbatches", "4,2", "--memory", "-1"], "--memory: expected a number from 0"),
        (["--stages", "4,2", "--microbatches", "4,2", "--cap", "0.1"], "--cap: rank 0 may hold 0.1"),
        (["--stages", "4,2", "--microbatches", "4,2", "--seconds", "-3"], "--seconds: expected a number from 0"),
        (["--stages", "4,2", "--microbatches", "4,2", "--models", "a,a"], "--models: expected different plain names"),
        (["--stages", "4", "--microbatches", "8", "--engine", "gpipe", "--cap", "3"], "--cap: gpipe needs 8 on rank 0"),
        (
            ["--stages", "4", "--microbatches", "4", "--seconds", "0", "--out", "/no/such/place"],
            "--out: expected a file in an existing",
        ),
    ],
)
def test_bad_input_is_one_message_that_names_the_option(capsys, change, message):
    code, _, err = run(capsys, "schedule", *change)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


INTERRUPTED = """
import sys
from plait.cli import main
from plait.planner.portfolio import Portfolio

turn = Portfolio.turn

def telling(self, for_memory):
    print("searching", file=sys.stderr, flush=True)
    turn(self, for_memory)

Portfolio.turn = telling
words = "schedule --stages 8,4 --microbatches 32,16 --forward 5,4 --memory 1.95,2 --seconds 600 --json"
sys.exit(main(words.split()))
"""


def test_ctrl_c_prints_the_best_so_far():
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert "searching\n" in iter(process.stderr.readline, "")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    record = json.loads(out)
    assert record["stopped_by"] == "interrupted"
    assert record["makespan"] <= 741


def test_timelines_are_shown_compared_and_converted(capsys, tmp_path):
    a, b, chrome = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"
    assert main([*SMALL, "--seconds", "0", "--engine", "greedy", "--timeline", str(a)]) == 0
    assert main([*SMALL, "--seconds", "0", "--engine", "gpipe", "--timeline", str(b)]) == 0
    capsys.readouterr()

    code, out, _ = run(capsys, "trace", "show", a)
    assert code == 0
    assert "rank 3" in out
    assert "kind" in out
    record = json.loads(run(capsys, "trace", "show", a, "--json")[1])
    assert record["num_actions"] == 48
    assert record["makespan_s"] == Timeline.load(a).makespan_s

    code, out, _ = run(capsys, "trace", "diff", a, a)
    assert (code, "the same actions in the same order" in out) == (0, True)
    code, out, _ = run(capsys, "trace", "diff", a, b)
    assert code == 1
    assert "a runs" in out
    assert json.loads(run(capsys, "trace", "diff", a, b, "--json")[1])["same_rows"] is False

    picture = tmp_path / "both.svg"
    assert run(capsys, "trace", "picture", picture, a, b)[0] == 0
    assert picture.read_text().count("<title>") == 2 * 48
    code, _, err = run(capsys, "trace", "picture", picture, a)
    assert (code, "--overwrite" in err) == (2, True)
    assert run(capsys, "trace", "picture", picture, a, "--overwrite")[0] == 0
    assert picture.read_text().count("<title>") == 48
    code, _, err = run(capsys, "trace", "picture", tmp_path / "both.png", a)
    assert (code, "OUT: pictures are SVG; give a name that ends in .svg" in err) == (2, True)
    code, _, err = run(capsys, "schedule", "--stages", "2", "--microbatches", "2", "--picture", tmp_path / "a.png")
    assert (code, "--picture: pictures are SVG" in err) == (2, True)
    code, _, err = run(capsys, "trace", "picture", tmp_path / "none.svg")
    assert (code, "expected at least one timeline" in err) == (2, True)

    assert run(capsys, "trace", "chrome", a, chrome)[0] == 0
    assert sum(event["ph"] == "X" for event in read_trace(chrome)) == 48
    assert run(capsys, "trace", "diff", a, chrome)[0] == 0

    code, _, err = run(capsys, "trace", "show", tmp_path / "none.json")
    assert (code, "none.json" in err) == (2, True)
    code, _, err = run(capsys, "trace", "show", a, "--step", 4)
    assert (code, "--step" in err) == (2, True)
