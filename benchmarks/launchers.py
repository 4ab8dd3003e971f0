"""The launchers beside each other: GRPO on two processes of one plan, begun by one command, by two, and by Ray.

    python benchmarks/launchers.py                        # on two idle cores
    python benchmarks/launchers.py --tiny --repeats 1     # does the benchmark itself work?

Every run is a `plait train` of its own with two processes of one thread, `--repeats` times in turns:

    local       the processes of one command
    beside ray  the same, while the processes of a Ray cluster that has nothing to do take their share of the cores
    attach      two commands that find each other over loopback, a process each
    ray         a node of a Ray cluster that runs already
    ray alone   a Ray cluster that is started for the run

Printed per kind, as medians: the seconds of a step (the first does not count) and their ratio to those of local
processes; the seconds from the command to the beginning of the first step, and how many more these are.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from ending import ends_when_terminated
from placed.processor_time import Used, used
from placed.recipes import grpo
from placed.runs import DEADLINE_S, RunFailed, begin, end, said_in
from sides import positive, row

from plait.observe.run_log import read_rows

RANKS = 2


@dataclass(frozen=True)
class Measured:
    """Seconds of a run: of a step, before the first one began, and processor seconds of a step."""

    step_s: float
    start_s: float
    used: Used


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    runs_by_kind: dict[str, list[Measured]] = {kind: [] for kind in options.kinds}
    with ends_when_terminated(), tempfile.TemporaryDirectory(prefix="plait-launchers-") as name:
        folder = Path(name)
        recipe = grpo(folder, is_tiny=options.tiny, prompts=options.prompts, samples=4, steps=1 + options.steps)
        recipe["plan"] = options.plan
        try:
            for number in range(options.repeats):
                for place, kind in enumerate(runs_by_kind):
                    with running_cluster() if kind in ("ray", "beside ray") else contextlib.nullcontext("") as address:
                        runs_by_kind[kind].append(measured(kind, recipe, folder / f"{place}-{number}", address))
        except RunFailed as error:
            print(error, file=sys.stderr)
            return 2
    report(runs_by_kind)
    return 0


def commands(kind: str) -> list[list[str]]:
    """The options of each command of a run."""
    if kind != "attach":
        return [["--launcher", LAUNCHERS[kind]]]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        leader = f"127.0.0.1:{probe.getsockname()[1]}"
    return [["--nodes", "2", "--node", str(node), "--leader", leader] for node in range(2)]


LAUNCHERS = {"local": "local", "beside ray": "local", "attach": "attach", "ray": "ray", "ray alone": "ray"}
KINDS = tuple(LAUNCHERS)


@contextlib.contextmanager
def running_cluster() -> Iterator[str]:
    """The address of a Ray cluster of one node on this machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": RANKS, "include_dashboard": False})
    address = str(cluster.address)
    try:
        yield address
    finally:
        cluster.shutdown()
        _wait_until_gone(address)


def _wait_until_gone(address: str) -> None:
    """Until nothing listens there, so that the next run does not find a cluster that is ending."""
    host, port = address.rsplit(":", 1)
    until = time.monotonic() + 60.0
    with contextlib.suppress(OSError):
        while time.monotonic() < until:
            socket.create_connection((host, int(port)), timeout=5.0).close()
            time.sleep(0.2)


def measured(kind: str, recipe: Mapping[str, Any], folder: Path, address: str) -> Measured:
    """Run it; raises `RunFailed` with the end of its output."""
    folder.mkdir()
    file, run = folder / "recipe.yaml", folder / "run"
    keys = {"devices": RANKS, "run_dir": str(run)}
    file.write_text(yaml.safe_dump({**recipe, **keys}))
    begun = time.monotonic()
    where = {"RAY_ADDRESS": address} if address else {}
    processes = [begin(["-m", "plait", "train", str(file), *options], folder, where) for options in commands(kind)]
    try:
        first_s = _step_ended_s(1, run / "metrics.jsonl", processes, begun)
        before = used()
        _step_ended_s(int(recipe["steps"]), run / "metrics.jsonl", processes, begun)
        after = used()
        for process in processes:
            process.wait(max(1.0, begun + DEADLINE_S - time.monotonic()))
    finally:
        end(*processes)
    if any(process.returncode for process in processes):
        codes = [process.returncode for process in processes]
        raise RunFailed(f"{kind}: a run ended with {codes}:\n{said_in(folder)}")
    steps = [float(metrics["timing_s/step"]) for metrics in read_rows(run / "metrics.jsonl")]
    per_step = Used(*((b - a) / (len(steps) - 1) for a, b in zip(before, after, strict=True)))
    return Measured(median(steps[1:]), first_s - begun - steps[0], per_step)


def _step_ended_s(number: int, file: Path, processes: Sequence[subprocess.Popen[bytes]], begun: float) -> float:
    """When the row of so many steps was written; when the run had ended, if it never was."""
    while not (file.is_file() and file.read_bytes().count(b"\n") >= number):
        if time.monotonic() - begun > DEADLINE_S:
            raise RunFailed(f"no step {number} of a run within {DEADLINE_S:.0f} s")
        if all(process.poll() is not None for process in processes):
            break
        time.sleep(0.01)
    return time.monotonic()


def report(runs_by_kind: Mapping[str, Sequence[Measured]]) -> None:
    print(row("", ["step", "to local", "workers", "beside", "start", "more"]))
    local = medians(next(iter(runs_by_kind.values())))
    for kind, runs in runs_by_kind.items():
        ours = medians(runs)
        cells = [f"{ours.step_s:.3f} s", f"{ours.step_s / local.step_s:.3f}"]
        cells += [f"{seconds:.3f} s" for seconds in ours.used]
        print(row(kind, [*cells, f"{ours.start_s:.1f} s", f"{ours.start_s - local.start_s:+.1f} s"]))


def medians(runs: Sequence[Measured]) -> Measured:
    workers, beside = zip(*(run.used for run in runs), strict=True)
    used_s = Used(median(workers), median(beside))
    return Measured(median(run.step_s for run in runs), median(run.start_s for run in runs), used_s)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers")
    parser.add_argument(
        "--kinds", choices=KINDS, nargs="+", default=KINDS, help="the first is what others are set beside"
    )
    parser.add_argument("--steps", type=positive, default=8, help="of each run, that count")
    parser.add_argument("--prompts", type=positive, default=8, help="of a step, 4 samples each")
    parser.add_argument("--plan", default="colocated", help="of the runs; `split` leaves each core free half the time")
    parser.add_argument("--repeats", type=positive, default=3)
    return parser


if __name__ == "__main__":
    sys.exit(main())
