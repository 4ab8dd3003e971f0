"""The schedule search against RLHFuse's published schedules, and against proven optima of random problems.

    python benchmarks/schedule_search.py [--seconds 60] [--exact-seconds 10] [--rows 0,1,…] [--random 200]
                                         [--capped 60] [--seed 0]

Times are CPU seconds of this process, so that other work on the machine does not count; loading or compiling the
search is done before. The first table has, for each of the twelve problems, the greedy schedule (ours and published),
when our search reached the lower bound and its peak memory at the end, the published best, and what the search with
OR-Tools reaches in `--exact-seconds` of wall time. The second part solves random problems with the search in 5 s each
and with CP-SAT to a proof, and prints the share in which the search found the optimum; the third does so with problems
that are all under tight memory caps. OR-Tools is only needed for its
columns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from schedule.published import PROBLEMS, Problem
from schedule.random_workloads import capped_workload, random_workload

from plait.planner.evaluate import score_order
from plait.planner.exact import available, minimise_makespan, search_exact
from plait.planner.greedy import greedy
from plait.planner.search import Progress, search
from plait.planner.tables import order_of, tables_of
from plait.schedule.pipeline import Workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--exact-seconds", type=float, default=10.0, help="0 leaves the column out")
    parser.add_argument("--rows", default=",".join(str(problem.number) for problem in PROBLEMS))
    parser.add_argument("--random", type=int, default=200, metavar="COUNT")
    parser.add_argument("--capped", type=int, default=60, metavar="COUNT", help="random problems under tight caps")
    parser.add_argument("--random-seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    search(PROBLEMS[2].workload, 60.0, max_moves=200_000)
    rows = [int(word) for word in options.rows.split(",") if word]
    if rows:
        table([PROBLEMS[row] for row in rows], options)
    if options.random:
        optima(random_workload, options.random, options.random_seconds, options.seed)
    if options.capped:
        optima(capped_workload, options.capped, options.random_seconds, options.seed)


def table(problems: list[Problem], options: argparse.Namespace) -> None:
    print(" #  pair     N1/N2   M1/M2  | greedy memory   | search bound  at s memory  at s    | published   | OR-Tools")
    at_bound = lean = exact_at_bound = 0
    for p in problems:
        t = tables_of(p.workload)
        order = greedy(p.workload, t)
        assert order is not None, "greedy deadlocks only under caps"
        first = score_order(p.workload, t, order)
        course: list[Progress] = []
        solution = search(
            p.workload, options.seconds, seed=options.seed, clock=time.process_time, on_progress=course.append
        )
        best, bound = solution.score, solution.lower_bound
        reached = next((x.seconds for x in course if x.makespan <= bound * (1 + 1e-9)), None)
        leanest = since(course) if course else 0.0
        at_bound += reached is not None or best.makespan == bound
        lean += best.worst_peak <= p.peak_memory + 1e-9
        exact = ""
        if options.exact_seconds and available():
            solved = search_exact(p.workload, options.exact_seconds, seed=options.seed)
            exact_at_bound += solved.score.makespan <= bound * (1 + 1e-9)
            exact = f"{solved.score.makespan:>5g} {solved.seconds:>4.1f}"
        mark = "<=" if best.worst_peak <= p.peak_memory + 1e-9 else "> "
        right = "=" if (first.makespan, round(first.worst_peak, 2)) == (p.greedy, p.greedy_memory) else "!"
        cells = (
            f"{p.number:>2}  {p.pair}  {'/'.join(map(str, p.stages)):<6}  {'/'.join(map(str, p.microbatches)):<5} ",
            f"{first.makespan:>6g} {first.worst_peak:>6.2f} {right}",
            f"{best.makespan:>6g} {bound:>5g} {reached or 0.0:>5.1f} {best.worst_peak:>6.2f} {leanest:>5.1f} {mark}",
            f"{p.makespan:>4} {p.peak_memory:>6.2f}",
            exact,
        )
        print(" | ".join(cells), flush=True)
    print(f"search at the bound on {at_bound} of {len(problems)}, peak memory at most published on {lean}", end="")
    print(f", with OR-Tools at the bound on {exact_at_bound}" if options.exact_seconds and available() else "")


def since(course: list[Progress]) -> float:
    """When the last schedule was found."""
    end = course[-1]
    same = (
        x for x in course if x.makespan <= end.makespan * (1 + 1e-9) and x.peak_memory <= end.peak_memory * (1 + 1e-9)
    )
    return next(same).seconds


def optima(problem: Callable[[int], Workload], count: int, seconds: float, seed: int) -> None:
    if not available():
        print("random problems need OR-Tools for the proof: pip install 'plait[exact]'")
        return
    equal, unproven, by_itself, missed = 0, 0, 0, []
    for number in range(seed, seed + count):
        workload = problem(number)
        solution = search(workload, seconds, seed=number, memory=False, clock=time.process_time)
        if solution.proven:
            equal, by_itself = equal + 1, by_itself + 1
            continue
        solved = minimise_makespan(workload, 300.0, order_of(workload, solution.schedule), seed=number)
        if not solved.proven:
            unproven += 1
        elif solution.score.makespan <= solved.bound + 1e-6:
            equal += 1
        else:
            missed.append(f"{number}: {solution.score.makespan:g} instead of {solved.bound:g}")
        if sys.stderr.isatty():
            print(f"\r{number + 1 - seed} of {count}, missed {len(missed)}", end="", file=sys.stderr)
    proven = count - unproven
    print(
        f"{problem.__name__}: the search in {seconds:g} s found the optimum in {equal} of {proven} "
        f"({equal / proven:.1%}) and proved it in {by_itself}"
    )
    print(f"  not proven by CP-SAT in 300 s: {unproven}; missed: {'; '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
