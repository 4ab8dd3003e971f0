"""An actor and a critic that train together in one pipeline, against every other way to train them on two workers.

    python benchmarks/fused_training.py                        # on two idle cores
    python benchmarks/fused_training.py --tiny --repeats 1     # does the benchmark itself work?

Two workers of one thread each, two random models of equal size, batches of equal lengths, M micro-batches. In turns,
`--repeats` times, each with the same tokens and one optimizer step of each model:

    1F1B        both models in two stages, one after the other
    opposite    1F1B of both, the second in the opposite direction, without a barrier between them
    greedy      the order of RLHFuse's greedy rule, where its search begins, with a backward of two forwards
    fused       the order that the search of `plait schedule` finds, of equal durations
    dp          both models whole on both workers, half of the rows each, gradients summed over the workers
    one each    the actor on one worker, the critic on the other

The ideal of `fused` against 1F1B one after the other is (M + 1) / M: no bubbles at all; that of `opposite` and `greedy`
what their orders take where every action takes what it should. Data parallelism and one model
for each worker have none either, where a worker has room for whole models: fusion cannot beat them, and is for those
that have not. Printed is what was measured, whatever it shows.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from placed.fused import ROLES, FusedWorker, write_model
from sides import positive, row

from plait.launch.local import LocalProcesses
from plait.planner.evaluate import score
from plait.planner.greedy import greedy
from plait.planner.search import search
from plait.planner.tables import schedule_from, tables_of
from plait.schedule.generators import one_f_one_b
from plait.schedule.pipeline import Workload, fused_workload
from plait.schedule.schedule import Schedule

WARM_UP = 1
DEADLINE_S = 900.0
KINDS = {
    "1F1B": "1F1B",
    "opposite": "together",
    "greedy": "together",
    "fused": "together",
    "dp": "dp",
    "one each": "one each",
}
"""How it is called → the arrangement of workers."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="plait-fused-") as name:
        folder = Path(name) / "model"
        write_model(folder, is_tiny=options.tiny)
        with LocalProcesses(threads=1).start(FusedWorker, 2, arguments=(str(folder), options.dtype)) as group:
            for count in options.micro_batches:
                orders = schedules(count)
                runs: dict[str, list[float]] = {kind: [] for kind in KINDS}
                for _ in range(options.repeats):
                    for kind, arrangement in KINDS.items():
                        how = (count * options.samples, options.tokens, count, WARM_UP + options.steps)
                        handle = group.submit(range(2), "seconds", arrangement, *how, orders.get(kind))
                        of_ranks = handle.result(DEADLINE_S)
                        runs[kind] += [max(both) for both in list(zip(*of_ranks, strict=True))[WARM_UP:]]
                report(count, runs, orders)
    return 0


def schedules(count: int) -> dict[str, Schedule]:
    """Of both models with so many micro-batches each, by the kind that follows them."""
    workload, tables = workload_of(count), tables_of(workload_of(count))
    order = greedy(workload, tables)
    assert order is not None, "there is no cap that the greedy rule could run into"
    best = search(workload, 600.0, max_moves=100_000).schedule
    return {
        "opposite": one_f_one_b(workload),
        "greedy": schedule_from(workload, tables, order, "greedy"),
        "fused": best,
    }


def workload_of(count: int) -> Workload:
    return fused_workload((2, 2), (count, count), (1.0, 1.0), models=ROLES)


def report(count: int, runs: dict[str, list[float]], orders: dict[str, Schedule]) -> None:
    print(row(f"M = {count}", ["seconds", "speed", "ideal", "of it"]))
    base, one_by_one = median(runs["1F1B"]), 6.0 * (count + 1)
    ideals = dict.fromkeys(KINDS, (count + 1) / count) | {"1F1B": 1.0}
    ideals |= {kind: one_by_one / score(workload_of(count), orders[kind]).makespan for kind in ("opposite", "greedy")}
    for kind, seconds in runs.items():
        speed, ideal = base / median(seconds), ideals[kind]
        print(row(kind, [f"{median(seconds):.4f}", f"{speed:.3f}", f"{ideal:.3f}", f"{speed / ideal:.1%}"]))
    print()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="models of two small layers")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument("--micro-batches", type=positive, nargs="+", default=[2, 4, 8], help="M, some numbers")
    parser.add_argument("--samples", type=positive, default=2, help="of a micro-batch")
    parser.add_argument("--tokens", type=positive, default=128, help="of a sample")
    parser.add_argument("--steps", type=positive, default=3, help="of each turn, behind its first")
    parser.add_argument("--repeats", type=positive, default=7)
    return parser


if __name__ == "__main__":
    sys.exit(main())
