import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plait.errors import ConfigError, RunError
from plait.observe.run_log import RunLog, read_rows, write_rows
from plait.observe.trace import TraceEvent, TraceWriter, read_trace
from plait.runtime.folder import run_lock
from plait.runtime.folder.directory import RunDirectory

RECIPE = "model: m\nsteps: 3\n"


def begun(path: Path, recipe: str, *, overwrite: bool = False) -> RunDirectory:
    """A folder with a run in it, held."""
    directory = RunDirectory.claim(path, overwrite=overwrite)
    directory.begin(recipe)
    return directory


def test_paths_and_recipe(tmp_path: Path):
    run = tmp_path / "runs" / "a"
    with begun(run, RECIPE) as directory:
        assert directory.files.recipe == run / "recipe.yaml"
        assert directory.files.recipe.read_text() == RECIPE
        assert directory.files.metrics == run / "metrics.jsonl"
        assert directory.files.samples(1) == run / "samples" / "step-000001.jsonl"
        assert directory.files.trace == run / "trace.json"
        assert directory.files.checkpoints == run / "checkpoints"
        assert (directory.files.best, directory.files.final) == (run / "best", run / "final")


def test_an_existing_run_is_refused_and_the_three_remedies_named(tmp_path: Path):
    begun(tmp_path, RECIPE).close()
    (tmp_path / "checkpoints/step-1").mkdir(parents=True)
    remedies = r"key `run_dir`.*holds a run already.*; continue it with.*resume=True.*`overwrite: true`.*`run_dir`"
    with pytest.raises(ConfigError, match=remedies):
        begun(tmp_path, RECIPE)
    RunDirectory.resume(tmp_path).close()


@pytest.mark.parametrize("saved", ["checkpoints/step-2", "checkpoints/step-2.replaced", "final", "run.json"])
def test_only_where_no_step_was_ever_saved_a_run_may_begin_again_by_other_keys(tmp_path: Path, saved: str):
    begun(tmp_path, RECIPE).close()
    (tmp_path / "checkpoints/step-1.tmp").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"no step is saved; begin again .*resume=True.* the same keys or others"):
        begun(tmp_path, RECIPE)
    if saved == "run.json":
        (tmp_path / saved).write_text('{"format": "plait-run", "version": 1, "saved_step": 2, "stays": []}')
    else:
        (tmp_path / saved).mkdir()
    with pytest.raises(ConfigError, match=r"recipe\.yaml.*\); continue it with"):
        begun(tmp_path, RECIPE)


def test_overwrite_clears_what_a_run_wrote_and_nothing_else(tmp_path: Path):
    keep = tmp_path / "elsewhere"
    keep.mkdir()
    (keep / "weights").write_text("precious")
    run = tmp_path / "run"
    with begun(run, RECIPE) as directory:
        write_rows(directory.files.samples(1), [{"text": "x"}])
        RunLog(directory.files.metrics).close()
        (run / "checkpoints" / "step-1").mkdir(parents=True)
        (run / "final").symlink_to(keep)
        (run / "notes.txt").write_text("mine")
    with begun(run, "model: other\n", overwrite=True) as directory:
        assert directory.files.recipe.read_text() == "model: other\n"
    assert sorted(path.name for path in run.iterdir()) == ["notes.txt", "recipe.yaml", "run.lock"]
    assert (keep / "weights").read_text() == "precious", "a link is removed, not what it points to"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_someone_else_is_never_used_or_cleared(tmp_path: Path, overwrite: bool):
    (tmp_path / "recipe.yaml").write_text("eggs: 3")
    with pytest.raises(ConfigError, match=r"key `run_dir`.*no run directory of plait.*neither used nor cleared"):
        begun(tmp_path, RECIPE, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
    assert (tmp_path / "recipe.yaml").read_text() == "eggs: 3"


def test_no_run_is_begun_in_what_another_one_clears(tmp_path: Path):
    begun(tmp_path / "run", RECIPE).close()
    for inside in ("checkpoints/x", "final", "final/a/b"):
        with pytest.raises(
            ConfigError, match=rf"^key `run_dir`: .*run/{inside} lies in `{inside.split('/')[0]}` of the"
        ):
            begun(tmp_path / "run" / inside, RECIPE)
    begun(tmp_path / "run" / "mine", RECIPE).close()
    begun(tmp_path / "final", RECIPE).close()
    with begun(tmp_path / "run", RECIPE, overwrite=True):
        assert (tmp_path / "run" / "mine" / "recipe.yaml").is_file(), "what no run writes is never cleared"


def test_a_file_in_the_way_and_a_run_that_is_not_there(tmp_path: Path):
    (tmp_path / "file").write_text("")
    long = tmp_path / ("x" * 300)
    for path, said in (
        (tmp_path / "file", "is a file; give"),
        (tmp_path / "file" / "below", "cannot be written"),
        (long, "cannot be written"),
    ):
        with pytest.raises(ConfigError, match=rf"key `run_dir`.*{said}"):
            begun(path, RECIPE)
    with pytest.raises(ConfigError, match=r"key `run_dir`: .* cannot be written: .*File name too long"):
        RunDirectory.resume(long)
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="no run to resume"):
            RunDirectory.resume(path)
    assert not (tmp_path / "absent").exists()


def test_a_link_to_nowhere_is_named(tmp_path: Path):
    (link := tmp_path / "link").symlink_to(tmp_path / "scratch")
    for path in (link, link / "run"):
        with pytest.raises(ConfigError, match=f"{link} is a link to {tmp_path}/scratch, which does not exist"):
            begun(path, RECIPE)


def test_a_run_that_is_begun_by_another_process_is_in_use_for_who_would_resume_it(tmp_path: Path):
    """It has no recipe yet."""
    with (
        RunDirectory.claim(tmp_path / "run"),
        pytest.raises(ConfigError, match=f"is in use by process {os.getpid()} on "),
    ):
        RunDirectory.resume(tmp_path / "run")


def test_a_folder_that_another_run_has_taken_is_no_longer_that_of_the_first(tmp_path: Path):
    run = tmp_path / "run"
    with begun(run, RECIPE) as first:
        leader = RunDirectory.lent(run)
        (run / "run.lock").touch()
        for directory in (first, leader):
            directory.check_in_place()
        run.rename(tmp_path / "moved")
        with begun(run, RECIPE):
            (run / "run.lock").write_text("another process")
            for directory in (first, leader):
                with pytest.raises(RunError, match=f"{run} is no longer the folder of this run"):
                    directory.check_in_place()
            (run / "run.lock").unlink()  # by a person who takes it for one that was left
            first.check_in_place()


def test_a_run_that_died_before_its_recipe_was_written_is_no_run(tmp_path: Path):
    begun(tmp_path, RECIPE).close()
    (tmp_path / "recipe.yaml").unlink()
    with pytest.raises(ConfigError, match="no run to resume"):
        RunDirectory.resume(tmp_path)
    begun(tmp_path, RECIPE).close()


def test_a_second_holder_is_told_who_holds_it(tmp_path: Path):
    with begun(tmp_path, RECIPE):
        message = f"key `run_dir`: .* is in use by process {os.getpid()} on .*"
        for second in (
            lambda: RunDirectory.resume(tmp_path),
            lambda: begun(tmp_path, RECIPE),
            lambda: begun(tmp_path, "model: other\n", overwrite=True),
        ):
            with pytest.raises(ConfigError, match=message):
                second()
        assert (tmp_path / "recipe.yaml").read_text() == RECIPE
    RunDirectory.resume(tmp_path).close()


HOLDER = """
import os, sys, time
from plait.runtime.folder.directory import RunDirectory
directory = RunDirectory.resume(sys.argv[1])
worker = os.fork()
if worker == 0:
    print(os.getpid(), flush=True)
    time.sleep(30)
    os._exit(0)
time.sleep(30)
"""


def test_a_dead_holder_holds_nothing_even_while_its_forked_worker_lives(tmp_path: Path):
    begun(tmp_path, RECIPE).close()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    worker = int(holder.stdout.readline())
    try:
        with pytest.raises(ConfigError, match=f"process {holder.pid} on"):
            RunDirectory.resume(tmp_path)
        holder.kill()
        assert holder.wait(10) == -signal.SIGKILL
        os.kill(worker, 0)  # it lives
        RunDirectory.resume(tmp_path).close()
    finally:
        os.kill(worker, signal.SIGKILL)
        holder.stdout.close()


def test_closing_in_the_holder_frees_it_though_a_forked_worker_lives(tmp_path: Path):
    with begun(tmp_path, RECIPE):
        worker = os.fork()
        if worker == 0:
            time.sleep(30)
            os._exit(0)
    try:
        RunDirectory.resume(tmp_path).close()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def run_step(directory: RunDirectory, step: int, life: str, trace: TraceWriter, log) -> None:
    write_rows(directory.files.samples(step), [{"step": step, "life": life}])
    trace.append([TraceEvent(f"{life} {step}", float(step), step + 0.5)])
    log.append({"step": step, "life": life})


def test_after_a_rollback_each_step_stands_once_in_every_log(tmp_path: Path):
    with begun(tmp_path, RECIPE) as directory:
        assert directory.offsets() == {}
        with RunLog(directory.files.metrics) as log, TraceWriter(directory.files.trace) as trace:
            for step in (1, 2):
                run_step(directory, step, "first", trace, log)
            offsets = directory.offsets()
            run_step(directory, 3, "first", trace, log)
        with open(directory.files.metrics, "a") as file:
            file.write('{"step": 4, "li')  # killed here
        (tmp_path / "samples" / "step-000004.jsonl.tmp").write_text("{")

    with RunDirectory.resume(tmp_path) as directory:
        directory.rollback_to(json.loads(json.dumps(offsets)), 2)
        with (
            RunLog(directory.files.metrics, resume=True) as log,
            TraceWriter(directory.files.trace, resume=True) as trace,
        ):
            for step in (3, 4):
                run_step(directory, step, "second", trace, log)

    expected = [(1, "first"), (2, "first"), (3, "second"), (4, "second")]
    assert [(row["step"], row["life"]) for row in read_rows(tmp_path / "metrics.jsonl")] == expected
    names = [event["name"] for event in read_trace(tmp_path / "trace.json") if event["ph"] == "X"]
    assert names == [f"{life} {step}" for step, life in expected]
    samples = sorted((tmp_path / "samples").iterdir())
    assert [path.name for path in samples] == [f"step-{step:06d}.jsonl" for step in (1, 2, 3, 4)]
    assert [read_rows(path)[0]["life"] for path in samples] == [life for _, life in expected]


@pytest.mark.parametrize("further", ["nothing", "a later step", "a torn line"])
def test_a_run_that_is_over_keeps_the_actions_of_its_last_evaluation(tmp_path: Path, further: str):
    """Behind the last checkpoint stand its own writing, of step 2, and the evaluation, of none."""
    with begun(tmp_path, RECIPE) as directory, TraceWriter(directory.files.trace) as trace:
        trace.append([TraceEvent("train", 1.0, 2.0, args=(("step", 2),))])
        offsets, saved = directory.offsets(), directory.files.trace.read_bytes()
        trace.append([TraceEvent("save", 2.0, 3.0, lane="disk", args=(("step", 2),)), TraceEvent("evaluate", 3.0, 4.0)])
        whole = directory.files.trace.read_bytes()
        if further == "a later step":
            trace.append([TraceEvent("train", 4.0, 5.0, args=(("step", 3),))])
    if further == "a torn line":
        with open(tmp_path / "trace.json", "a") as file:
            file.write('{"name": "eval')
    with RunDirectory.resume(tmp_path) as directory:
        directory.rollback_to(offsets, 2, is_over=True)
        assert directory.files.trace.read_bytes() == (whole if further == "nothing" else saved)
        directory.rollback_to(offsets, 2)
        assert directory.files.trace.read_bytes() == saved


def test_a_rollback_to_the_start_leaves_empty_logs(tmp_path: Path):
    with begun(tmp_path, RECIPE) as directory:
        with RunLog(directory.files.metrics) as log, TraceWriter(directory.files.trace) as trace:
            run_step(directory, 1, "first", trace, log)
        directory.rollback_to({}, 0)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.yaml", "run.lock", "samples"]
        assert list((tmp_path / "samples").iterdir()) == []


def test_a_log_that_lost_rows_stops_the_resume(tmp_path: Path):
    with begun(tmp_path, RECIPE) as directory:
        RunLog(directory.files.metrics).close()
        with pytest.raises(RunError, match=r"metrics\.jsonl should hold at least 5 bytes.*holds 0"):
            directory.rollback_to({"metrics.jsonl": 5}, 1)


def test_evaluations_are_cut_back_by_their_step(tmp_path: Path):
    """That of the step itself stays, though it may be younger than the checkpoint: it is of the same weights."""
    with begun(tmp_path, RECIPE) as directory:
        with RunLog(directory.files.evaluations) as log:
            for step in (0, 2, 4):
                log.append({"step": step, "eval/reward": 0.5})
                write_rows(directory.files.evaluation_samples(step), [{"step": step}])
        with open(directory.files.evaluations, "a") as file:
            file.write('{"step": 6, "ev')
        directory.rollback_to({}, 2)
        assert [row["step"] for row in read_rows(directory.files.evaluations)] == [0, 2]
        assert directory.files.evaluations.read_bytes().endswith(b"}\n")
        assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
            "eval-000000.jsonl",
            "eval-000002.jsonl",
        ]
        directory.rollback_to({}, 0)
        assert [row["step"] for row in read_rows(directory.files.evaluations)] == [0]


def test_a_claim_that_is_not_begun_leaves_no_trace(tmp_path: Path):
    run = tmp_path / "runs" / "a"
    with RunDirectory.claim(run) as directory:
        directory.files.reward_output.write_text("import\n")
        with pytest.raises(ConfigError, match="is in use by process"):
            RunDirectory.claim(run)
    assert list(tmp_path.iterdir()) == []
    run.mkdir(parents=True)
    RunDirectory.claim(run).close()
    assert list(run.iterdir()) == [], "a folder that was there stays"

    begun(run, RECIPE).close()
    (run / "rewards.log").write_text("old\n")
    with RunDirectory.claim(run, overwrite=True) as directory, open(directory.files.reward_output, "a") as output:
        output.write("new\n")
    assert (run / "recipe.yaml").read_text() == RECIPE
    assert (run / "rewards.log").read_text() == "old\n"
    log = run / "rewards.log"
    with RunDirectory.claim(run, overwrite=True) as directory, open(log, "a", buffering=1) as output:
        output.write("imported\n")
        directory.begin("model: other\n")
        output.write("scored\n")
    assert (run / "rewards.log").read_text() == "imported\nscored\n"


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Lustre has none unless it is mounted so."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(
        ConfigError, match=r"key `run_dir`: files cannot be locked in .*/run \(Function not implemented\)"
    ):
        RunDirectory.claim(tmp_path / "run")


def test_a_lock_whose_file_was_removed_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Opened before its holder removed it, locked after: whoever comes next would lock another file. Here it is so each
    time that it is tried."""
    monkeypatch.setattr(run_lock, "TRIES_S", 0.0)
    flock = fcntl.flock

    def late(fd: int, operation: int) -> None:
        (tmp_path / "run.lock").unlink()
        flock(fd, operation)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", late)
        with pytest.raises(ConfigError, match="in use by another process"):
            RunDirectory.claim(tmp_path)
    RunDirectory.claim(tmp_path).close()
