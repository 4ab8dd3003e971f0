"""The engines of the schedule search, a portfolio that takes turns: the best schedule so far, and whose turn it is.

Four engines work on the best schedule known: dispatch rules that evolve (`evolution.evolve`), annealing on
critical arcs (`annealing.anneal`; both from RLHFuse's paper notes, B5), annealing on keys that any decode fits the
memory caps (`annealing.wander`), and, once the makespan stands, annealing of the memory above a goal that sinks
(`annealing.squeeze`). Under memory caps every other turn goes to a fifth, which grows many partial schedules side by
side (`sweep`), wider each time, until one of them was wide enough to be a proof. The order of turns and every random
number follow from the seed.
"""

from __future__ import annotations

import numpy as np

from plait.planner import annealing, evolution, kernels
from plait.planner.bounds import lower_bound, memory_bound
from plait.planner.evolution import LEANNESS
from plait.planner.greedy import greedy
from plait.planner.kernels import TOLERANCE
from plait.planner.sweep import Sweep
from plait.planner.tables import Ints, Tables, order_of, tables_of
from plait.schedule.generators import one_at_a_time, opposite
from plait.schedule.pipeline import Workload

LEG = 200_000
"""Partial schedules of a sweep tried in a turn."""
WIDTH, MOST_BYTES = 64, 2 * 10**8
"""Partial schedules kept by the first sweep, and memory for those of the widest."""
MEAN_WEIGHT = 2.0
"""Weight of the mean in a sweep; the best of 0, 0.1, 0.3, 0.5 and 2 on random problems."""


def start_orders(workload: Workload, t: Tables) -> list[Ints]:
    """Orders to start from: greedy, 1F1B of one model after the other both ways round, and one micro-batch at a time.

    Greedy may run into a deadlock under a memory cap; the last of them never does.
    """
    plain = (*opposite(workload), one_at_a_time(workload))
    orders = [order_of(workload, schedule) for schedule in plain]
    first = greedy(workload, t)
    return orders if first is None else [first, *orders]


class _Descent:
    """One annealing from `hot` to 3 % of it, cut into legs short enough for progress and Ctrl-C.

    values: the order, or the keys, that the engine is changing
    """

    def __init__(self, values: np.ndarray, moves: int, legs: int, hot: float):
        self.values = values
        self.legs = legs
        self.temperature = hot
        self._moves_per_leg = moves // legs
        self._cooling = 0.03 ** (1 / legs)

    def leg(self) -> tuple[int, float, float]:
        """The moves of the next leg and the temperatures at which it begins and ends."""
        self.legs -= 1
        hot = self.temperature
        self.temperature *= self._cooling
        return self._moves_per_leg, hot, self.temperature


class Portfolio:
    """One search; `turn` takes a fraction of a second."""

    def __init__(self, workload: Workload, seed: int):
        self.t = tables_of(workload)
        self.bound = lower_bound(workload)
        self.lean = memory_bound(workload)
        # Two streams of a combined generator; any seed must give two non-zero numbers below its moduli.
        self.state = np.asarray([1 + (seed * 7919 + 1) % 2147483561, 1 + (seed * 104729 + 3) % 2147483397], np.int64)
        self.moves = 0
        self.turns = 0
        self.rounds = {"cool": 0, "rekey": 0, "squeeze": 0}
        self.descents: dict[str, _Descent] = {}
        self.capped = bool((self.t.cap < np.inf).any())
        self.sweep: Sweep | None = None
        self.width = WIDTH
        self.n = n = len(self.t.rank)
        self.second = float(np.median(self.t.seconds))
        grains = np.abs(self.t.memory[self.t.memory != 0])
        self.grain = float(grains.min()) if len(grains) else 1.0
        self.memory_unit = self.lean or self.grain
        """What memory is counted in where schedules that hold less are bred; first stages may hold nothing."""
        self.pool = np.zeros((len(LEANNESS), 10, 10 * len(workload.models()) + 2))
        self.pool_score = np.full((len(LEANNESS), 10), np.inf)
        self.makespan = self.peak = np.inf
        self.best = np.zeros(n, np.int64)
        for order in start_orders(workload, self.t):
            self.offer(order)
        self.evolved = self.best.copy()
        self.evolved_scores = np.asarray([self.makespan, self.peak])

    @property
    def at_bound(self) -> bool:
        return self.makespan <= self.bound * (1 + TOLERANCE)

    def done(self, memory: bool) -> bool:
        return self.at_bound and (not memory or self.peak <= self.lean * (1 + TOLERANCE))

    def offer(self, order: Ints) -> bool:
        """Keep the order if it is better than the best."""
        makespan = kernels.evaluate(self.t, order, np.inf, np.zeros(self.n), self._scratch())
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

    def compile(self) -> None:
        """Load or compile the kernels, which may take seconds once, before the clock starts."""
        t, order, keys, state = self.t, self.best.copy(), np.zeros(self.n), self.state.copy()
        annealing.anneal(t, order, t.cap, self.bound, 0, 1.0, 0.5, state, order.copy())
        annealing.squeeze(t, order, 0.0, 0.0, 0, 1.0, 0.5, state, order.copy())
        annealing.wander(t, keys, t.cap, self.bound, 0, 1.0, 0.5, state, order.copy())
        scores = self.evolved_scores.copy()
        evolution.evolve(t, t.cap, self.bound, self.memory_unit, 0, state, self.pool, self.pool_score, scores, order)
        if self.capped:
            Sweep(t, 0.0, 1, MEAN_WEIGHT, state).leg(1)

    def turn(self, for_memory: bool) -> None:
        """One turn of one engine: dispatch rules at first and now and then, else an annealer. With caps a leg of a
        sweep comes before it."""
        if self.capped and not self.at_bound:
            self.widen()
            if self.at_bound:
                return
        self.turns += 1
        if self.turns <= 2 or self.turns % 8 == 0:
            self.breed()
        elif for_memory:
            self.squeeze()
        elif self.turns % 2:
            self.rekey()
        else:
            self.cool()

    def widen(self) -> None:
        """A leg of the sweep, or the first of one that keeps more if the last one found nothing."""
        limit = self.makespan * (1 - 2 * TOLERANCE)
        if self.sweep is None:
            self.sweep = Sweep(self.t, limit, self.width, MEAN_WEIGHT, self.state)
        sweep = self.sweep
        sweep.limit = min(sweep.limit, limit)
        self.moves += 1 + sweep.leg(LEG) // self.n
        if not sweep.ended:
            return
        self.sweep = None
        order = sweep.order()
        shorter = order is not None and self.offer(order)
        if not sweep.cut:
            self.bound = self.makespan
        elif not shorter:
            self.width = min(2 * self.width, max(WIDTH, MOST_BYTES // sweep.bytes_of_a_row))

    def breed(self) -> None:
        """Evolve dispatch rules."""
        scores = self.evolved_scores
        self.moves += evolution.evolve(
            self.t, self.t.cap, self.bound, self.memory_unit, max(20, 1_000_000 // self.n), self.state,
            self.pool, self.pool_score, scores, self.evolved,
        )  # fmt: skip
        if self.offer(self.evolved):
            self.descents.pop("squeeze", None)

    def cool(self) -> None:
        """A leg of annealing on critical arcs."""
        round = self.rounds["cool"]
        if (descent := self._open("cool")) is None:
            start = (self.best, self.best, self.evolved)[round % 3]
            moves = 200 * self.n * (1, 3, 10)[round // 4 % 3]
            hot = self.second * (0.3, 1.0, 2.5)[round % 3]
            descent = self._begin("cool", start.copy(), moves, hot, 25_000_000 // self.n)
        best = self.best.copy()
        moves, hot, cold = descent.leg()
        _, made = annealing.anneal(self.t, descent.values, self.t.cap, self.bound, moves, hot, cold, self.state, best)
        self.moves += made
        self.offer(best)

    def rekey(self) -> None:
        """A leg of annealing on keys."""
        round = self.rounds["rekey"]
        if (descent := self._open("rekey")) is None:
            end = np.zeros(self.n)
            start = (self.best, self.best, self.evolved)[round % 3]
            kernels.evaluate(self.t, start, np.inf, end, self._scratch())
            moves = 300 * self.n * (1, 3, 10)[round // 4 % 3]
            hot = self.second * (1.0, 3.0, 6.0)[round // 3 % 3]
            descent = self._begin("rekey", end - self.t.seconds, moves, hot, 4_000_000 // self.n)
        best = self.best.copy()
        moves, hot, cold = descent.leg()
        _, made = annealing.wander(self.t, descent.values, self.t.cap, self.bound, moves, hot, cold, self.state, best)
        self.moves += made
        self.offer(best)

    def squeeze(self) -> None:
        """A leg of annealing of the memory above a goal somewhat below the best peak, at the best makespan."""
        round = self.rounds["squeeze"]
        if (descent := self._open("squeeze")) is None:
            as_short = self.evolved_scores[0] <= self.makespan * (1 + TOLERANCE)
            start = self.evolved if round % 3 == 2 and as_short else self.best
            hot = self.grain * (1.0, 3.0, 8.0)[round % 3]
            descent = self._begin("squeeze", start.copy(), max(200_000, 800 * self.n), hot, 25_000_000 // self.n)
        goal = max(self.lean, self.peak - self.grain * (0.5, 1.0, 2.0, 4.0)[round // 3 % 4])
        best = self.best.copy()
        moves, hot, cold = descent.leg()
        limit = self.makespan * (1 + TOLERANCE)
        _, made = annealing.squeeze(self.t, descent.values, goal, limit, moves, hot, cold, self.state, best)
        self.moves += made
        if self.offer(best):
            self.descents.pop("squeeze")

    def _open(self, engine: str) -> _Descent | None:
        """The engine's descent if it has legs left."""
        descent = self.descents.get(engine)
        return descent if descent is not None and descent.legs else None

    def _begin(self, engine: str, values: np.ndarray, moves: int, hot: float, moves_per_leg: int) -> _Descent:
        self.rounds[engine] += 1
        self.descents[engine] = _Descent(values, moves, -(-moves // max(moves_per_leg, 500)), hot)
        return self.descents[engine]

    def _scratch(self) -> Ints:
        return np.zeros(3 * len(self.t.cap), np.int64)
