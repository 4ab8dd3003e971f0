"""Search for a short, then lean, fused schedule; needs no solver.

Three engines work by turns on the best schedule known (RLHFuse notes B5): dispatch rules that evolve
(`kernels.evolve`), annealing on critical arcs (`kernels.anneal`), and, once the makespan stands, annealing of the
memory above a goal that sinks (`kernels.squeeze`). The order of turns and every random number follow from the seed, so
a search that ends by `max_moves`, or at both bounds, gives the same schedule every time; one that ends by its time
limit gives a prefix of that search.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from plait.errors import ConfigError
from plait.schedule import kernels
from plait.schedule.bounds import lower_bound, memory_bound
from plait.schedule.evaluate import Score, score_order
from plait.schedule.generators import one_at_a_time, one_f_one_b
from plait.schedule.greedy import greedy
from plait.schedule.kernels import LEANNESS, TOLERANCE
from plait.schedule.pipeline import Workload
from plait.schedule.schedule import Schedule
from plait.schedule.tables import Ints, Tables, order_of, schedule_from, tables_of

Stop = Literal["bounds", "time", "moves", "interrupted"]


@dataclass(frozen=True, slots=True)
class Progress:
    """What a search knows after a turn: seconds so far, best makespan and peak memory, and the makespan's bound."""

    seconds: float
    makespan: float
    peak_memory: float
    lower_bound: float
    moves: int


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a search.

    score:       of `schedule`
    lower_bound: no schedule is shorter
    proven:      no schedule of this workload is shorter (the makespan equals a proven bound)
    seconds:     wall time; moves: schedules tried
    stopped_by:  `bounds` when neither makespan nor peak memory can be lower
    """

    schedule: Schedule
    score: Score
    lower_bound: float
    proven: bool
    seconds: float
    moves: int
    stopped_by: Stop


def search(
    workload: Workload,
    seconds: float = 10.0,
    *,
    seed: int = 0,
    max_moves: int | None = None,
    memory: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """The best schedule found within `seconds`: least makespan, then least peak memory of the worst rank.

    max_moves:   stop after so many schedules tried, for a result that does not depend on the speed of the machine
    memory:      whether to go on after the bound of the makespan is reached, until the bound of the memory is
    on_progress: called after every turn (a fraction of a second)
    clock:       what `seconds` is measured by; a benchmark passes `time.process_time`
    Ctrl-C ends the search and the best schedule so far is returned (`stopped_by` is "interrupted").
    """
    if seconds < 0:
        raise ConfigError(f"seconds: expected zero or more, found {seconds}")
    hunt = _Hunt(workload, seed)
    kernels.anneal(
        hunt.t, hunt.best.copy(), hunt.t.cap, hunt.bound, 0, 1.0, 0.5, hunt.state.copy(), hunt.best.copy()
    )
    began = clock()
    stopped_by: Stop = "bounds"
    try:
        while not hunt.done(memory):
            spent = clock() - began
            if spent >= seconds:
                stopped_by = "time"
                break
            if max_moves is not None and hunt.moves >= max_moves:
                stopped_by = "moves"
                break
            share = max(spent / seconds if seconds else 1.0, hunt.moves / max_moves if max_moves else 0.0)
            hunt.turn(memory and (hunt.at_bound or share > 0.8))
            if on_progress is not None:
                on_progress(Progress(clock() - began, hunt.makespan, hunt.peak, hunt.bound, hunt.moves))
    except KeyboardInterrupt:
        stopped_by = "interrupted"
    return Found(
        schedule_from(workload, hunt.t, hunt.best, "fused"),
        score_order(workload, hunt.t, hunt.best),
        hunt.bound,
        hunt.at_bound,
        clock() - began,
        hunt.moves,
        stopped_by,
    )


def start_orders(workload: Workload, t: Tables) -> list[Ints]:
    """Orders to start from: greedy, 1F1B of one model after the other both ways round, and one micro-batch at a time.

    Greedy may run into a deadlock under a memory cap; the last of them never does.
    """
    turned = Workload(workload.pipelines[::-1], workload.num_ranks, workload.caps)
    plain = (one_f_one_b(workload), one_f_one_b(turned), one_at_a_time(workload))
    orders = [order_of(workload, schedule) for schedule in plain]
    first = greedy(workload, t)
    return orders if first is None else [first, *orders]


class _Hunt:
    """The state of one search; `turn` takes a fraction of a second."""

    def __init__(self, workload: Workload, seed: int):
        self.t = tables_of(workload)
        self.bound = lower_bound(workload)
        self.lean = memory_bound(workload)
        # Two streams of a combined generator; any seed must give two non-zero numbers below its moduli.
        self.state = np.asarray([1 + (seed * 7919 + 1) % 2147483561, 1 + (seed * 104729 + 3) % 2147483397], np.int64)
        self.moves = 0
        self.turns = 0
        self.cold_turns = 0
        self.lean_turns = 0
        n = len(self.t.rank)
        self.candidates = max(20, 1_000_000 // n)
        self.swaps = max(2_000, 25_000_000 // n)
        num_genes = 5 * 2 * len(workload.models()) + 2
        self.pool = np.zeros((len(LEANNESS), 10, num_genes))
        self.pool_score = np.full((len(LEANNESS), 10), np.inf)
        self.evolved: Ints | None = None
        self.evolved_found = np.asarray([np.inf, np.inf])
        self.current: Ints | None = None
        self.leaning: Ints | None = None
        self.temperature = 0.0
        self.unit = float(np.median(self.t.seconds))
        self.round = self.left = self.wround = self.wleft = 0
        self.bias = None
        self.capped = bool(np.isfinite(self.t.cap).any())
        self.penalty = np.inf
        self.grain = float(np.abs(self.t.memory).mean()) or 1.0
        self.grains = np.unique(np.abs(self.t.memory[self.t.memory != 0]))
        self.makespan = self.peak = np.inf
        self.best = np.zeros(n, np.int64)
        for order in start_orders(workload, self.t):
            self.offer(order)

    @property
    def at_bound(self) -> bool:
        return self.makespan <= self.bound * (1 + TOLERANCE)

    def done(self, memory: bool) -> bool:
        return self.at_bound and (not memory or self.peak <= self.lean * (1 + TOLERANCE))

    def offer(self, order: Ints) -> bool:
        """Keep the order if it is better than the best."""
        scratch = np.zeros(3 * len(self.t.cap), np.int64)
        makespan = kernels.evaluate(self.t, order, np.inf, np.zeros(len(order)), scratch)
        peak = np.zeros(len(self.t.cap))
        worst = kernels.peaks(self.t, order, peak)
        if (peak > self.t.cap * (1 + TOLERANCE)).any():
            return False
        slack = 1 + TOLERANCE
        if makespan * slack < self.makespan or (makespan <= self.makespan * slack and worst * slack < self.peak):
            self.makespan, self.peak = makespan, worst
            self.best = order.copy()
            return True
        return False

    def turn(self, for_memory: bool) -> None:
        """One turn of one engine."""
        self.turns += 1
        if for_memory:
            self.breed() if self.turns < V.get("pre", 3) or self.turns % V.get("mix", 8) == 0 else self.lean_out()
        elif self.turns <= 2 or self.turns % 6 == 0:
            self.breed()
        elif self.turns % V.get('wmix',2)==0:
            self.stray()
        else:
            self.cool()

    def breed(self) -> None:
        if self.evolved is None:
            self.evolved = self.best.copy()
            self.evolved_found[:] = self.makespan, self.peak
        self.moves += kernels.evolve(
            self.t, self.t.cap, self.bound, self.lean, self.candidates, self.state, self.pool, self.pool_score,
            self.evolved_found, self.evolved,
        )  # fmt: skip
        if self.offer(self.evolved):
            self.leaning = None

    def cool(self) -> None:
        """A leg of annealing; each descent of six legs starts from the best or from the evolved schedule."""
        n=len(self.t.rank)
        descent = int(V.get('per',200) * n * (1,3,10)[(self.round//4)%3])
        swaps = min(descent, self.swaps)
        legs = -(-descent // swaps)
        round = self.round
        if self.left == 0 or self.current is None:
            self.left = legs
            turn_about = round % 3 == 2
            self.current = (self.evolved if turn_about and self.evolved is not None else self.best).copy()
            self.temperature = self.unit * V.get('hots',(0.3, 1.0, 2.5))[round % 3]
            self.round+=1
        self.left -= 1
        best = self.best.copy()
        cooled = self.temperature * (V.get('cr',0.03) ** (1 / legs))
        _, moves = kernels.anneal(
            self.t, self.current, self.t.cap, self.bound, swaps, self.temperature, cooled,
            self.state, best,
        )  # fmt: skip
        self.temperature = cooled
        self.moves += moves
        self.offer(best)

    def stray(self) -> None:
        n=len(self.t.rank)
        descent = int(V.get('wper',300) * n * (1,3,10)[(self.wround//4)%3])
        most = max(500, 4_000_000 // n)
        swaps = min(descent, most)
        legs = -(-descent // swaps)
        round = self.wround
        if self.wleft == 0 or self.bias is None:
            self.wleft = legs
            end = np.zeros(n)
            src=(self.evolved if round % 3 == 2 and self.evolved is not None else self.best)
            kernels.evaluate(self.t, src, np.inf, end, np.zeros(3 * len(self.t.cap), np.int64))
            self.bias = end - self.t.seconds
            self.delay = V.get('delays',(0.,1.,0.5))[round % 3]
            self.wtemp = self.unit * V.get('whots',(1.0, 3.0, 6.))[(round//3) % 3]
            self.wround+=1
        self.wleft -= 1
        best = self.best.copy()
        cooled = self.wtemp * (0.03 ** (1 / legs))
        _, moves = kernels.wander(
            self.t, self.bias, self.t.cap, self.bound, swaps, self.wtemp, cooled, self.state, best,
        )  # fmt: skip
        self.wtemp = cooled
        self.moves += moves
        self.offer(best)

    def lean_out(self) -> None:
        """A leg of memory annealing towards a goal a little below the best peak."""
        legs = max(4, int(V.get("descent", 200_000)) // self.swaps)
        leg = self.lean_turns % legs
        round = self.lean_turns // legs
        grain = float(self.grains[0]) if len(self.grains) else 0.0
        if leg == 0 or self.leaning is None:
            start = self.best
            if (
                round % V.get("other", 3) == V.get("other", 3) - 1
                and self.evolved is not None
                and self.evolved_found[0] <= self.makespan * (1 + TOLERANCE)
            ):
                start = self.evolved
            self.leaning = start.copy()
            self.temperature = grain * V.get("temps", (1.0, 3.0, 8.0))[round % len(V.get("temps", (1.0, 3.0, 8.0)))]
        self.lean_turns += 1
        goals = V.get("goals", (0.5, 1.0, 2.0, 4.0))
        goal = max(self.lean, self.peak - grain * goals[(round // 3) % len(goals)])
        best = np.empty_like(self.leaning)
        cooled = self.temperature * (V.get("ratio", 0.03) ** (1 / legs))
        limit = self.makespan * (1 + TOLERANCE)
        _, moves = kernels.squeeze(
            self.t, self.leaning, goal, limit, self.swaps, self.temperature, cooled, self.state, best
        )
        self.temperature = cooled
        self.moves += moves
        if self.offer(best) and V.get("reset", 1):
            self.leaning = None
            self.lean_turns += -self.lean_turns % legs


V = {}
