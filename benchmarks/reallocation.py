"""Bytes that plait's mover plans between two layouts, against what other systems move, and the time to plan them.

    python benchmarks/reallocation.py [--models "135M tied,7B GQA"] [--repeats 3]
    python benchmarks/reallocation.py --processes 2 [--models "135M tied"] [--dtype bfloat16] [--repeats 9]

The first, torch-free: nothing is moved, volumes are exact. Weights are bfloat16; masters float32, sent as bfloat16.
Columns are GB received by all ranks together, and in brackets GB through the busiest node's network in one direction:

    plait      the plan as given; it is the least possible for every rank and for every node
    regrouped  plait with the target's ranks reordered inside their nodes (`layout.regroup`), where the mesh stays
    HybridFlow all-gathers in micro-DP groups, where all sizes divide and the mesh stays (network not modelled)
    ReaL       broadcast groups, where tp sizes divide
    gather all every rank gathers the whole model and slices

`plan` is CPU seconds of this process, least of the repeats; `messages` and `rounds` are the plan's.

The second: as many workers (gloo, one thread each) move real weights by plait's mover, by ReaL's broadcasts and
by gathering everything (`reallocation/real.py`), in turns on the same buffers. Columns are the median of the
repetitions in milliseconds, each that of its slowest rank; in brackets the quartiles; then the MB that all ranks
received. Planning is left out, as is making groups. With more workers than cores the times say little.
"""

from __future__ import annotations

import argparse
import statistics
import time

from reallocation.cases import CASES, REAL_CASES, Case, models
from reallocation.strategies import Volume, broadcasts, gather_all, micro_dp

from plait.layout.holdings import Holdings, weights, zero_shards
from plait.layout.move import plan_move
from plait.layout.move_plan import MovePlan
from plait.layout.params import Parameters
from plait.layout.regroup import regrouped


def main() -> None:
    families = models()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help=f"of {', '.join(families)}; all unless told, with --processes the first")
    parser.add_argument("--repeats", type=int, help="3 unless told, with --processes 9")
    parser.add_argument("--processes", type=int, choices=sorted(REAL_CASES), help="move real weights between workers")
    parser.add_argument("--dtype", default="bfloat16", help="of real weights")
    options = parser.parse_args()
    if options.processes:
        for name in (options.models or next(iter(families))).split(","):
            real_moves(name, options.processes, options.dtype, options.repeats or 9)
        return
    columns = ("plait", "regrouped", "HybridFlow", "ReaL", "gather all")
    for name in (options.models or ",".join(families)).split(","):
        parameters = families[name]
        print(f"\n{name}: {parameters.num_elements / 1e9:.2f} G parameters, {len(parameters.params)} tensors")
        print(f"{'':<21} {''.join(f'{column:>17}' for column in columns)}  plan s  messages  rounds")
        for case in CASES:
            print(line(case, parameters, options.repeats or 3), flush=True)


def real_moves(name: str, processes: int, dtype: str, repeats: int) -> None:
    from reallocation.real import WAYS, Worker

    from plait.launch.local import LocalProcesses

    print(f"\n{name}, {dtype}, {processes} processes: ms (quartiles) | MB received")
    print(f"{'':<40} {''.join(f'{way:>32}' for way in WAYS)}")
    with LocalProcesses(threads=1).start(Worker, processes, arguments=(name, dtype)) as group:
        for before, after in REAL_CASES[processes]:
            moves = group.submit(range(processes), "measure", before, after, repeats).result(600.0)
            cells = []
            for way in WAYS:
                seconds = [max(times) for times in zip(*(ranks[way].seconds for ranks in moves), strict=True)]
                low, middle, high = statistics.quantiles(
                    seconds if repeats > 1 else 2 * seconds, n=4, method="inclusive"
                )
                size = sum(ranks[way].received for ranks in moves)
                text = f"{middle * 1e3:.1f} ({low * 1e3:.1f}-{high * 1e3:.1f}) | {size / 1e6:.1f}"
                cells.append(text.rjust(32))
            print(f"{f'{before} to {after}':<40} {''.join(cells)}", flush=True)


def line(case: Case, parameters: Parameters, repeats: int) -> str:
    plan, seconds = planned(case, parameters, repeats)
    ours = volume_of(plan)
    source = held(case, parameters)
    same = set(case.before.mesh.ranks) == set(case.after.mesh.ranks)
    better = regrouped(case.after, parameters, source, case.cluster) if same else None
    target = weights(parameters, case.after, "bfloat16")
    cells = [
        cell(ours),
        cell(volume_of(plan_move(source, weights(parameters, better, "bfloat16"), case.cluster)) if better else None),
        cell(None if case.zero or not better else micro_dp(parameters, case.before, better, 2), network=False),
        cell(None if case.zero else broadcasts(parameters, case.before, case.after, case.cluster, 2)),
        cell(None if case.zero else gather_all(source, target, case.cluster)),
    ]
    counts = f"{plan.traffic.num_messages:>9} {plan.num_rounds:>7}"
    return f"{case.name:<21} {''.join(cells)} {seconds:>7.3f} {counts}"


def held(case: Case, parameters: Parameters) -> Holdings:
    if case.zero:
        return zero_shards(parameters, case.before, "float32", "before")
    return weights(parameters, case.before, "bfloat16", "before")


def planned(case: Case, parameters: Parameters, repeats: int) -> tuple[MovePlan, float]:
    """The plan and the least CPU seconds that it took, the holdings included."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        plan = plan_move(held(case, parameters), weights(parameters, case.after, "bfloat16"), case.cluster)
        best = min(best, time.process_time() - start)
    return plan, best


def volume_of(plan: MovePlan) -> Volume:
    volume = Volume()
    for (_, receiver), size in plan.traffic.link_bytes.items():
        volume.received[receiver] += size
    for node, (out, into) in plan.traffic.node_bytes.items():
        volume.leaving[node], volume.entering[node] = out, into
    return volume


def cell(volume: Volume | None, network: bool = True) -> str:
    if volume is None:
        return f"{'-':>17}"
    inside = f" ({volume.busiest_node / 1e9:.2f})" if network else " " * 7
    return f"{volume.total / 1e9:.2f}{inside}".rjust(17)


if __name__ == "__main__":
    main()
