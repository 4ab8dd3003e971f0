"""What `plait schedule` says of a schedule that it found: to a person, to a program, and beside others."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.planner.evaluate import Score
    from plait.planner.search import SearchResult
    from plait.schedule.pipeline import Workload
    from plait.schedule.timeline import Timeline


def baselines_of(workload: Workload) -> dict[str, float]:
    """Makespans to hold a fused schedule against, by name. One that a memory cap rules out is left out."""
    from plait.planner.bounds import data_parallel_ideal
    from plait.planner.evaluate import score, score_order, serial_makespan
    from plait.planner.greedy import greedy
    from plait.planner.tables import tables_of
    from plait.schedule.generators import one_f_one_b, opposite

    alone = {model: one_f_one_b(workload.only(model)) for model in workload.models()}
    baselines = {"1F1B-serial": serial_makespan(workload, alone)}
    scored = [score(workload, schedule) for schedule in opposite(workload)]
    fitting = [s.makespan for s in scored if all(p <= c for p, c in zip(s.peak_memory, workload.caps, strict=True))]
    if len(alone) > 1 and fitting:
        baselines["1F1B-opposite"] = min(fitting)
    order = greedy(workload)
    if order is not None:
        baselines["greedy"] = score_order(workload, tables_of(workload), order).makespan
    baselines["data-parallel ideal"] = data_parallel_ideal(workload)
    return baselines


def report(
    workload: Workload, result: SearchResult, score: Score, baselines: dict[str, float], predicted: Timeline
) -> str:
    """What a person reads: makespan, bound, baselines, memory and bubbles of each rank, a Gantt chart."""
    from plait.schedule.gantt import ascii_gantt

    gap = score.makespan / result.lower_bound - 1 if result.lower_bound else 0.0
    verdict = "optimal" if result.proven else f"at most {gap:.1%} above the optimum"
    idle = sum(score.bubble) / len(score.bubble)
    lines = [
        f"makespan     {score.makespan:g}   ({verdict})",
        f"lower bound  {result.lower_bound:g}",
        f"bubbles      {idle:.1%} of the ranks' time",
        f"peak memory  {score.worst_peak:g}",
    ]
    if result.stopped_by != "rule":
        ending = {"bounds": "nothing left to gain", "interrupted": "interrupted"}.get(result.stopped_by, "time is up")
        lines.append(f"search       {result.seconds:.1f} s, {result.moves} schedules tried: {ending}")
    lines += [
        "",
        "baseline                makespan   this is",
    ]
    for name, makespan in baselines.items():
        lines.append(f"{name:<22}{makespan:>10g}   {makespan / score.makespan:.2f}x as fast")
    lines.append("(the ideal has no pipeline and no all-reduce: it bounds any placement, fused or not)")
    lines += ["", "rank   busy   peak memory" + ("   cap" if max(workload.caps) < inf else "")]
    for rank, (bubble, peak) in enumerate(zip(score.bubble, score.peak_memory, strict=True)):
        limit = f"   {workload.caps[rank]:g}" if workload.caps[rank] < inf else ""
        lines.append(f"{rank:>4}  {1 - bubble:>5.1%}   {peak:>11g}{limit}")
    names = ", ".join(f"{model[0].lower()} {model[0].upper()} {model}" for model in workload.models())
    lines += ["", f"forward backward of each model: {names}; . idle", ascii_gantt(predicted)]
    return "\n".join(lines)


def record(result: SearchResult, score: Score, baselines: dict[str, float]) -> dict[str, object]:
    return {
        "makespan": score.makespan,
        "lower_bound": result.lower_bound,
        "proven": result.proven,
        "peak_memory": list(score.peak_memory),
        "bubbles": list(score.bubble),
        "baselines": baselines,
        "seconds": round(result.seconds, 3),
        "stopped_by": result.stopped_by,
        "actions": [list(row) for row in result.schedule.ids()],
    }
