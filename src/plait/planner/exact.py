"""OR-Tools CP-SAT as engine: a schedule with a proof, where the optional package is installed.

The same problem as the search's: every rank does one action at a time, a micro-batch goes through its stages and back,
the micro-batches of a chain keep their order, activations fit the caps. First the makespan, then the peak memory of
the worst rank at that makespan.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import floor, inf, lcm
from typing import Any

import numpy as np

from plait.errors import ConfigError
from plait.planner.bounds import lower_bound
from plait.planner.evaluate import score_order
from plait.planner.search import Progress, SearchResult, search
from plait.planner.tables import Ints, Tables, order_of, schedule_from, tables_of
from plait.schedule.pipeline import Workload

_SCALE_LIMIT = 10**6


@dataclass(frozen=True, slots=True)
class Solved:
    """What the solver knows: the best order, a proven lower bound of the makespan, whether the order attains it, and
    whether Ctrl-C ended the solving.
    """

    order: Ints | None
    bound: float
    proven: bool
    interrupted: bool = False


def available() -> bool:
    """Whether OR-Tools is installed (extra `exact`)."""
    from importlib.util import find_spec

    return find_spec("ortools") is not None


def search_exact(
    workload: Workload,
    seconds: float = 10.0,
    *,
    seed: int = 0,
    on_progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """The best schedule of the search and of CP-SAT together; `proven` tells whether its makespan is optimal.

    A fifth of the time goes to the search, whose schedule the solver starts from; the solver proves or improves the
    makespan and takes what is left for the memory. Raises `ConfigError` when OR-Tools is missing.
    """
    _cp_model()
    began = time.monotonic()
    searched = search(workload, seconds / 5, seed=seed, on_progress=on_progress)
    if searched.stopped_by in ("bounds", "interrupted"):
        return searched
    t = tables_of(workload)
    best = order_of(workload, searched.schedule)
    proven, bound, interrupted = searched.proven, searched.lower_bound, False
    if not proven:
        solved = minimise_makespan(workload, seconds - (time.monotonic() - began), best, seed=seed)
        bound = max(bound, solved.bound)
        best = _better(workload, t, best, solved.order)
        proven, interrupted = solved.proven, solved.interrupted
    left = seconds - (time.monotonic() - began)
    if left > 0.1 and not interrupted:
        makespan = score_order(workload, t, best).makespan
        best = _better(workload, t, best, minimise_memory(workload, makespan, left, best, seed=seed))
    return SearchResult(
        schedule_from(workload, t, best, "fused"),
        score_order(workload, t, best),
        bound,
        proven,
        time.monotonic() - began,
        searched.moves,
        "interrupted" if interrupted else "time",
    )


def minimise_makespan(workload: Workload, seconds: float, start: Ints | None = None, *, seed: int = 0) -> Solved:
    """The shortest schedule that CP-SAT finds, starting from an order, and the bound that it proves.

    `proven` is given only where all durations are exact in the solver's whole numbers.
    """
    model = _Model(workload, start)
    model.cp.Minimize(model.makespan)
    status, solver = model.solve(seconds, seed)
    bound = max(solver.BestObjectiveBound() / model.scale, lower_bound(workload)) if model.exact else 0.0
    # The solver catches Ctrl-C itself and returns what it has, before its time.
    interrupted = status != "optimal" and solver.WallTime() < 0.9 * seconds
    if not status:
        return Solved(None, bound, False, interrupted)
    return Solved(model.order(solver), bound, model.exact and status == "optimal", interrupted)


def minimise_memory(workload: Workload, makespan: float, seconds: float, start: Ints, *, seed: int = 0) -> Ints | None:
    """The leanest schedule that ends by `makespan`, or None when none is found in time."""
    model = _Model(workload, start)
    model.cp.Add(model.makespan <= floor(makespan * model.scale * (1 + 1e-12)))
    model.minimise_peak()
    status, solver = model.solve(seconds, seed)
    return model.order(solver) if status else None


class _Model:
    """The constraint model of a workload; times and memory in whole numbers."""

    def __init__(self, workload: Workload, start: Ints | None):
        cp_model = _cp_model()
        self.t = t = tables_of(workload)
        self.workload = workload
        self.cp: Any = cp_model.CpModel()
        self.solver: Any = cp_model.CpSolver()
        self.statuses = {cp_model.OPTIMAL: "optimal", cp_model.FEASIBLE: "feasible"}
        seconds, self.scale, self.exact = _whole(t.seconds)
        memory, self.grain, _ = _whole(t.memory)
        horizon = int(sum(seconds))
        self.starts = [self.cp.NewIntVar(0, horizon, f"s{a}") for a in range(len(seconds))]
        ends = [self.starts[a] + seconds[a] for a in range(len(seconds))]
        self.makespan = self.cp.NewIntVar(floor(lower_bound(workload) * self.scale * (1 - 1e-12)), horizon, "makespan")
        for a in range(len(seconds)):
            if t.before[a] >= 0:
                self.cp.Add(self.starts[a] >= ends[t.before[a]])
            if t.place[a] > 0:
                self.cp.Add(self.starts[a] >= ends[a - 1])
            self.cp.Add(ends[a] <= self.makespan)
        self.held: list[tuple[list[Any], list[int]]] = []
        for rank in range(workload.num_ranks):
            mine = [a for a in range(len(seconds)) if t.rank[a] == rank]
            self.cp.AddNoOverlap([self.cp.NewFixedSizeIntervalVar(self.starts[a], seconds[a], f"i{a}") for a in mine])
            spans, demands = [], []
            for a in mine:
                if memory[a] > 0:
                    back = self._backward_of(a)
                    length = self.cp.NewIntVar(0, horizon, f"l{a}")
                    spans.append(self.cp.NewIntervalVar(self.starts[a], length, ends[back], f"m{a}"))
                    demands.append(memory[a])
            self.held.append((spans, demands))
            if workload.caps[rank] < inf and workload.caps[rank] * self.grain < sum(demands):
                room = floor(workload.caps[rank] * self.grain * (1 + 1e-12))
                self.cp.AddCumulative(spans, demands, room)
        if start is not None:
            self._hint(start)

    def minimise_peak(self) -> None:
        most = max((sum(demands) for _, demands in self.held), default=0)
        peak = self.cp.NewIntVar(0, most, "peak")
        for spans, demands in self.held:
            self.cp.AddCumulative(spans, demands, peak)
        self.cp.Minimize(peak)

    def solve(self, seconds: float, seed: int) -> tuple[str | None, Any]:
        """Returns ("optimal" or "feasible" or None, the solver)."""
        self.solver.parameters.max_time_in_seconds = max(seconds, 0.01)
        self.solver.parameters.num_workers = 1
        self.solver.parameters.random_seed = seed
        status = self.statuses.get(self.solver.Solve(self.cp))
        return status, self.solver

    def order(self, solver: Any) -> Ints:
        start = [solver.Value(variable) for variable in self.starts]
        t = self.t
        rows = [sorted(np.flatnonzero(t.rank == v), key=lambda a: start[a]) for v in range(self.workload.num_ranks)]
        return np.asarray([a for row in rows for a in row], np.int64)

    def _backward_of(self, a: int) -> int:
        """The backward that frees what forward `a` holds: the same place in the next chain."""
        t = self.t
        return int(t.chain_start[t.chain[a] + 1] + t.place[a])

    def _hint(self, order: Ints) -> None:
        from plait.planner.kernels import evaluate

        end = np.zeros(len(order))
        evaluate(self.t, order, np.inf, end, np.zeros(3 * self.workload.num_ranks, np.int64))
        for a, variable in enumerate(self.starts):
            self.cp.AddHint(variable, round((end[a] - self.t.seconds[a]) * self.scale))


def _cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ConfigError("engine: exact needs OR-Tools; install it with `pip install 'plait[exact]'`") from error
    return cp_model


def _whole(values: Any) -> tuple[list[int], int, bool]:
    """Values times a scale as whole numbers, the scale, and whether that is exact."""
    fractions = [Fraction(value).limit_denominator(_SCALE_LIMIT) for value in values.tolist()]
    scale = lcm(1, *{fraction.denominator for fraction in fractions})
    if scale > _SCALE_LIMIT:
        scale = _SCALE_LIMIT
    whole = [round(fraction * scale) for fraction in fractions]
    exact = all(abs(w / scale - v) <= 1e-12 * max(1.0, abs(v)) for w, v in zip(whole, values.tolist(), strict=True))
    return whole, scale, exact


def _better(workload: Workload, t: Tables, old: Ints, new: Ints | None) -> Ints:
    if new is None:
        return old
    before, after = score_order(workload, t, old), score_order(workload, t, new)
    if any(peak > cap * (1 + 1e-9) for peak, cap in zip(after.peak_memory, workload.caps, strict=True)):
        return old
    key = lambda score: (round(score.makespan, 9), round(score.worst_peak, 9))
    return new if key(after) < key(before) else old
