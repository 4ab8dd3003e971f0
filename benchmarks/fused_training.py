"""An actor and a critic that train together in one pipeline, against every other way to train them on two workers.

    python benchmarks/fused_training.py                        # on two idle cores
    python benchmarks/fused_training.py --tiny --repeats 1     # does the benchmark itself work?
    python benchmarks/fused_training.py --micro-batches 4 --repeats 1 --picture fused-training.svg    # of one, drawn

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
that have not. Printed is what was measured, whatever it shows. `--parts` adds what a worker's seconds went to in the
last step of each kind: forwards and backwards, messages that were waited for or sent, optimizer steps, and the rest.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from placed.fused import ROLES, VOCABULARY, FusedWorker
from random_llama import write_stages
from sides import positive, row

from plait.launch.local import LocalProcesses
from plait.planner.evaluate import score
from plait.planner.greedy import greedy
from plait.planner.search import search
from plait.planner.tables import schedule_from, tables_of
from plait.schedule.gantt import svg_gantts
from plait.schedule.generators import one_f_one_b
from plait.schedule.pipeline import Workload, fused_workload
from plait.schedule.schedule import Schedule
from plait.schedule.timeline import Span, Timeline
from plait.schedule.work import COMPUTE

WARM_UP = 1
DEADLINE_S = 900.0
PARTS = {
    "forward": {"F", "TRAIN"},
    "backward": {"B"},
    "receive": {"RECV_F", "RECV_B"},
    "send": {"SEND_F", "SEND_B"},
    "step": {"STEP"},
}
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
        write_stages(folder, VOCABULARY, 2 if options.tiny else 8, is_tiny=options.tiny)
        with LocalProcesses(threads=1).start(FusedWorker, 2, arguments=(str(folder), options.dtype)) as group:
            for count in options.micro_batches:
                orders = schedules(count)
                runs: dict[str, list[float]] = {kind: [] for kind in KINDS}
                lasts: dict[str, Last] = {}
                for _ in range(options.repeats):
                    for kind, arrangement in KINDS.items():
                        how = (count * options.samples, options.tokens, count, WARM_UP + options.steps)
                        handle = group.submit(range(2), "seconds", arrangement, *how, orders.get(kind))
                        of_ranks = handle.result(DEADLINE_S)
                        runs[kind] += [max(both) for both in list(zip(*of_ranks, strict=True))[WARM_UP:]]
                        spans = group.submit(range(2), "spans").result(DEADLINE_S)
                        lasts[kind] = Last(runs[kind][-1], [span for of_rank in spans for span in of_rank])
                report(count, runs, orders)
                if options.parts:
                    report_parts(lasts)
                if options.picture is not None:
                    options.picture.write_text(picture(lasts))
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


@dataclass(frozen=True)
class Last:
    """The last step of a kind: its seconds, and what both workers did in it."""

    seconds: float
    spans: list[Span]


def report_parts(lasts: Mapping[str, Last]) -> None:
    """Of a worker, in the mean of both."""
    print(row("seconds of a worker", [*PARTS, "rest"]))
    for kind, last in lasts.items():
        parts = [sum(span.duration_s for span in last.spans if span.kind in kinds) / 2 for kinds in PARTS.values()]
        print(row(kind, [f"{part:.4f}" for part in (*parts, last.seconds - sum(parts))]))
    print()


def picture(lasts: Mapping[str, Last]) -> str:
    """Both models one after the other and together, one above the other, as SVG."""
    panels = []
    for kind, title in (("1F1B", "1F1B, one after the other"), ("fused", "together")):
        spans = tuple(span for span in lasts[kind].spans if span.lane == COMPUTE)
        first = min(span.start_s for span in spans)
        panels.append((f"{title}: {lasts[kind].seconds:.2f} s", Timeline(spans, source="measured").shifted(-first)))
    return svg_gantts(panels)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="models of two small layers")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument("--micro-batches", type=positive, nargs="+", default=[2, 4, 8], help="M, some numbers")
    parser.add_argument("--samples", type=positive, default=2, help="of a micro-batch")
    parser.add_argument("--tokens", type=positive, default=128, help="of a sample")
    parser.add_argument("--steps", type=positive, default=3, help="of each turn, behind its first")
    parser.add_argument("--repeats", type=positive, default=7)
    parser.add_argument("--parts", action="store_true", help="what the seconds went to")
    parser.add_argument("--picture", type=Path, help="SVG of the last step, of the last number of micro-batches")
    return parser


if __name__ == "__main__":
    sys.exit(main())
