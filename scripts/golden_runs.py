"""Golden runs: do sources compute the same bits as those that a record was made by?

    python scripts/golden_runs.py check                      all runs, on the sources of this checkout
    python scripts/golden_runs.py check --quick              those that take little: a minute or two
    python scripts/golden_runs.py check --only dpo,plan.     runs whose names contain one of these
    python scripts/golden_runs.py list

`check` makes every run of `tests/golden/cases.py` anew and compares it with `tests/golden/record.json`: every metric of
every row (but times and memory), each column of the samples, the weights. It ends with 1 and says run, row, name and
both values where something that is recorded differs or is missing; what is new is listed, and is no error. Where the
processor or a library is not that of the record, numbers may differ for that reason alone: `check` says so first. Make
a record of one's own then, from the commit that the record names, and check against it:

    git worktree add --detach /elsewhere/base COMMIT
    PYTHONPATH=/elsewhere/base/src python scripts/golden_runs.py record --record /elsewhere/record.json
    python scripts/golden_runs.py check --record /elsewhere/record.json

The sources are those of PYTHONPATH where it names some, else of this checkout, whatever is installed. `record` writes
all runs; with `--only` or `--quick` it replaces or adds these. A run that is to compute something else from now on is
recorded anew by `record --only NAME`, and the commit says why.

`--jobs N` makes so many runs at once. Each has a process of its own and ends after `--deadline` seconds. Their folders
and what they printed stay in `--work DIR` where that is given, and are removed else.

    PYTHONPATH=/elsewhere/base/src python scripts/golden_runs.py begin

writes the checkpoints with which the runs named `begun.` begin (`tests/golden/checkpoints`). They are as old as the
record, and stay: what was saved then must go on as it would have gone on then.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
os.environ.update(dict.fromkeys(ONE_THREAD, "1"), TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if not any(
    (Path(folder) / "plait").is_dir() for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder
):
    sys.path.insert(0, str(ROOT / "src"))
    os.environ["PYTHONPATH"] = str(ROOT / "src")  # of the processes of a run

from tests.golden.cases import BEGUN_KEYS, BEGUN_STEPS, CASES, STEPS, Case, Keys  # noqa: E402
from tests.golden.inputs import write_inputs  # noqa: E402
from tests.golden.record import differences, fingerprint, record_of  # noqa: E402
from tests.runs.plan_files import write_plan  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"
CHECKPOINTS = GOLDEN / "checkpoints"
POLL_S = 0.001

Plan = str | dict[str, str] | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 where a run differs or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "check", "begin", "list"))
    parser.add_argument("--only", default="", help="parts of names, with commas between them")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--record", type=Path, default=GOLDEN / "record.json")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--deadline", type=float, default=900.0)
    options = parser.parse_args(arguments)
    parts = [part for part in options.only.split(",") if part]
    names = [name for name, case in CASES.items() if not options.quick or case.quick]
    names = [name for name in names if not parts or any(part in name for part in parts)]
    if not names:
        parser.error(f"no run has a name with {' or '.join(parts)}; `list` prints the names")
    if options.what == "list":
        print("\n".join(f"{name}{'  quick' if CASES[name].quick else ''}" for name in names))
        return 0
    with _work(options.work) as work:
        write_inputs(work / "inputs")
        if options.what == "begin":
            return _begin(work)
        if options.what == "record":
            return _record(options.record, _made(names, work, options.jobs, options.deadline))
        return _check(options.record, _made(names, work, options.jobs, options.deadline))


@contextlib.contextmanager
def _work(given: Path | None) -> Iterator[Path]:
    if given is None:
        with tempfile.TemporaryDirectory(prefix="golden-") as folder:
            yield Path(folder)
        return
    given.mkdir(parents=True, exist_ok=True)
    if any(given.iterdir()):
        raise SystemExit(f"golden_runs: `--work {given}` is not empty; give another folder")
    yield given.resolve()


def _record(path: Path, made: Iterator[tuple[str, dict[str, Any] | str]]) -> int:
    stored = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    here = fingerprint()
    if stored["runs"] and stored["fingerprint"] != here:
        raise SystemExit(f"golden_runs: {path} is of another machine or other libraries; remove it to begin anew")
    heads = {"commit": _commit(), "fingerprint": here}
    failed = 0
    for name, result in made:
        if isinstance(result, str):
            failed += 1
            print(f"{name}: {result}", flush=True)
            continue
        stored["runs"][name] = result
        print(f"{name}: recorded", flush=True)
        runs = {name: stored["runs"][name] for name in CASES if name in stored["runs"]}
        lines = [f"{json.dumps(name)}: {json.dumps(run, separators=(',', ':'))}" for name, run in runs.items()]
        path.write_text(f'{json.dumps(heads)[:-1]},\n"runs": {{\n' + ",\n".join(lines) + "\n}}\n")
    print(f"{len(stored['runs'])} runs in {path}, {failed} failed")
    return 1 if failed else 0


def _check(path: Path, made: Iterator[tuple[str, dict[str, Any] | str]]) -> int:
    stored = json.loads(path.read_text())
    here = fingerprint()
    for key, value in stored["fingerprint"].items():
        if here[key] != value:
            print(f"NOT THE MACHINE OF THE RECORD: {key} was `{value}`, is `{here[key]}`; bits may differ for that")
    differ, checked, news = 0, 0, set[str]()
    for name, result in made:
        checked += 1
        errors = _errors(stored["runs"].get(name), result, news)
        differ += bool(errors)
        print(f"{name}: " + (f"{len(errors)} DIFFERENCES" if errors else "equal"), flush=True)
        for error in errors[:12]:
            print(f"    {error}")
        if len(errors) > 12:
            print(f"    and {len(errors) - 12} more")
    for one in sorted(news):
        print(f"new, of some runs: {one}")
    print(f"{checked - differ} of {checked} runs are those of {stored['commit'][:7]}")
    return 1 if differ else 0


def _errors(recorded: dict[str, Any] | None, found: dict[str, Any] | str, news: set[str]) -> list[str]:
    if isinstance(found, str):
        return [found]
    if recorded is None:
        return ["it is not in the record; `record --only` adds it"]
    if recorded["case"] != found["case"]:
        return ["its recipe or plan is not the recorded one"]
    errors: list[str] = []
    for folder in recorded["folders"]:
        if folder not in found["folders"]:
            errors.append(f"{folder}: no such run")
            continue
        wrong, new = differences(recorded["folders"][folder], found["folders"][folder])
        errors += [f"{folder} {error}" if folder != "." else error for error in wrong]
        news |= set(new)
    return errors


def _made(names: Sequence[str], work: Path, jobs: int, deadline_s: float) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Make runs, `jobs` at a time; each with its record, or what went wrong, in the order in which they end."""
    import plait

    assert plait.train, "imported here once, so that a child need not"
    print(f"sources: {Path(plait.__file__).parent}", flush=True)
    waiting, running = list(names), dict[int, tuple[str, float]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            running[_forked(name, work)] = (name, time.monotonic() + deadline_s)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            name, _ = running.pop(pid)
            yield name, _result(name, work, os.waitstatus_to_exitcode(status))
        for late, (_, end) in running.items():
            if time.monotonic() > end:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(late, signal.SIGKILL)
        if not pid:
            time.sleep(0.01)


def _forked(name: str, work: Path) -> int:
    """A child in a process group of its own that makes a run and leaves; its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        log = os.open(work / f"{name}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(work)  # paths of recipes are relative to it
        _make(name, CASES[name])
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _result(name: str, work: Path, code: int) -> dict[str, Any] | str:
    if code:
        lines = (work / f"{name}.log").read_text().rstrip().splitlines()
        return f"failed with {code}: " + " | ".join(lines[-4:])
    run_dir = work / "runs" / name
    case = CASES[name]
    folders = {part: record_of(run_dir / part) for part in case.stages or (".",)}
    definition = {key: value for key, value in asdict(case).items() if key != "quick"}
    return {"case": hashlib.sha256(json.dumps(definition).encode()).hexdigest()[:16], "folders": folders}


def _make(name: str, case: Case) -> None:
    """Make a run in the folder `runs/NAME`."""
    run_dir = f"runs/{name}"
    if case.stages:
        import yaml

        tree = _tree(case.keys | {"steps": STEPS, "run_dir": run_dir}, case)
        Path(f"{name}.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
        _train(None, f"{name}.yaml")
        return
    keys = case.keys | {"run_dir": run_dir}
    if case.begun:
        shutil.copytree(CHECKPOINTS / case.begun, run_dir)
        _train(keys | {"steps": BEGUN_STEPS + 2} | _where(name, case.plan), resume=True)
        return
    for index, rows in enumerate(case.kills):
        _train_and_kill(keys | {"steps": STEPS}, rows, resume=index > 0)
    plans = (case.plan, *(case.plans or [case.plan] * len(case.stops)))
    for index, steps in enumerate((*case.stops, STEPS)):
        where = _where(f"{name}-{index}", plans[index])
        _train(keys | {"steps": steps} | where, resume=bool(case.kills) or index > 0)


def _train(keys: Keys | None, recipe: str | None = None, *, resume: bool = False) -> None:
    import plait

    outcome = plait.train(recipe, resume=resume, **(keys or {}))
    assert outcome.finished, "the run was stopped"


def _train_and_kill(keys: Keys, rows: int, *, resume: bool) -> None:
    """Kill a run as soon as it has logged so many steps."""
    log = Path(keys["run_dir"]) / "metrics.jsonl"
    pid = os.fork()
    if not pid:
        try:
            _train(keys, resume=resume)
        finally:
            os._exit(0)
    while not (log.is_file() and len(log.read_bytes().splitlines()) >= rows):
        if os.waitpid(pid, os.WNOHANG)[0]:
            raise RuntimeError(f"the run ended before step {rows}")
        time.sleep(POLL_S)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _where(name: str, plan: Plan) -> Keys:
    """The keys of a plan."""
    if plan is None:
        return {}
    if isinstance(plan, str):
        named, devices = plan.split()
        return {"plan": named, "devices": int(devices)}
    Path("plans").mkdir(exist_ok=True)
    return {"plan": str(write_plan(Path("plans"), name, plan))}


def _tree(keys: Keys, case: Case) -> dict[str, Any]:
    """A recipe of several stages."""
    tree: dict[str, Any] = {"stages": dict(case.stages)}
    for key, value in keys.items():
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return tree


def _begin(work: Path) -> int:
    """Write the runs that `begun.` cases go on with: all that resuming needs, and no more."""
    os.chdir(work)
    shutil.rmtree(CHECKPOINTS, ignore_errors=True)
    for name, (keys, plan) in BEGUN_KEYS.items():
        run_dir = f"runs/{name}"
        _train(keys | {"steps": BEGUN_STEPS, "run_dir": run_dir} | _where(name, plan))
        left_out = shutil.ignore_patterns("final", "best", "workers", "step-1", "rewards.log")
        shutil.copytree(run_dir, CHECKPOINTS / name, ignore=left_out)
    return 0


def _commit() -> str:
    """Of the sources that run."""
    import plait

    folder = Path(plait.__file__).parent
    git = ["git", "-C", str(folder)]
    if subprocess.run([*git, "diff", "--quiet", "HEAD", "--", str(folder)], check=False).returncode:
        raise SystemExit(f"golden_runs: {folder} has changes that are in no commit; a record names its commit")
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
