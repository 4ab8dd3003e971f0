"""The launchers beside each other: GRPO on two processes of one plan, begun by one command, by two, and by Ray.

    python benchmarks/launchers.py                        # on two idle cores
    python benchmarks/launchers.py --tiny --repeats 1     # does the benchmark itself work?

Every run is a `plait train` of its own with two processes of one thread, `--repeats` times in turns:

    local      the processes of one command
    attach     two commands that find each other over loopback, a process each
    ray        a node of a Ray cluster that runs already
    ray alone  a Ray cluster that is started for the run

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
from placed.recipes import grpo
from placed.runs import DEADLINE_S, RunFailed, begin, said_in
from sides import positive, row

from plait.observe.run_log import read_rows

RANKS = 2


@dataclass(frozen=True)
class Measured:
    """Seconds of a run: of a step, and before the first one began."""

    step_s: float
    start_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    found: dict[str, list[Measured]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="plait-") as name:
        folder = Path(name)
        recipe = grpo(folder, is_tiny=options.tiny, prompts=options.prompts, samples=4, steps=1 + options.steps)
        recipe["plan"] = options.plan
        try:
            for number in range(options.repeats):
                for place, kind in enumerate(KINDS):
                    with running_cluster() if kind == "ray" else contextlib.nullcontext("") as address:
                        found[kind].append(measured(kind, recipe, folder / f"{place}-{number}", address))
        except RunFailed as error:
            print(error, file=sys.stderr)
            return 2
    report(found)
    return 0


def commands(kind: str) -> list[list[str]]:
    """The options of each command of a run."""
    if kind != "attach":
        return [["--launcher", "ray" if kind.startswith("ray") else kind]]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        leader = f"127.0.0.1:{probe.getsockname()[1]}"
    return [["--nodes", "2", "--node", str(node), "--leader", leader] for node in range(2)]


KINDS = ("local", "attach", "ray", "ray alone")


@contextlib.contextmanager
def running_cluster() -> Iterator[str]:
    """The address of a Ray cluster of one node on this machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": RANKS, "include_dashboard": False})
    address = cluster.address
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
        first_s = _first_row_s(run / "metrics.jsonl", processes, begun)
        for process in processes:
            process.wait(max(1.0, begun + DEADLINE_S - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        codes = [process.returncode for process in processes]
        raise RunFailed(f"{kind}: a run ended with {codes}:\n{said_in(folder)}")
    steps = [float(one["timing_s/step"]) for one in read_rows(run / "metrics.jsonl")]
    return Measured(median(steps[1:]), first_s - begun - steps[0])


def _first_row_s(file: Path, processes: Sequence[subprocess.Popen[bytes]], begun: float) -> float:
    """When the first step was written; when the run had ended, if it never was."""
    while not (file.is_file() and file.stat().st_size):
        if time.monotonic() - begun > DEADLINE_S:
            raise RunFailed(f"no step of a run within {DEADLINE_S:.0f} s")
        if all(process.poll() is not None for process in processes):
            break
        time.sleep(0.01)
    return time.monotonic()


def report(found: Mapping[str, Sequence[Measured]]) -> None:
    print(row("", ["step", "to local", "start", "more"]))
    base = Measured(median(one.step_s for one in found["local"]), median(one.start_s for one in found["local"]))
    for kind, runs in found.items():
        step, start = median(one.step_s for one in runs), median(one.start_s for one in runs)
        cells = [f"{step:.3f} s", f"{step / base.step_s:.3f}", f"{start:.1f} s", f"{start - base.start_s:+.1f} s"]
        print(row(kind, cells))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers")
    parser.add_argument("--steps", type=positive, default=8, help="of each run, that count")
    parser.add_argument("--prompts", type=positive, default=8, help="of a step, 4 samples each")
    parser.add_argument("--plan", default="colocated", help="of the runs; `split` leaves each core free half the time")
    parser.add_argument("--repeats", type=positive, default=3)
    return parser


if __name__ == "__main__":
    sys.exit(main())
