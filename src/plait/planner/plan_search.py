"""Search for a plan: which ranks and which parallelism for each call, so that a step takes as little time as can be and
every rank has room at any time.

Of small spaces all plans are tried whose bound does not rule them out. Else a portfolio of seeded chains goes on: some
accept worse plans now and then, all start anew. Every other try is of the chain whose plan is best. Which plans are
tried follows from the seed alone, so a search with a larger budget tries the same first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf, log, prod
from random import Random
from typing import Literal

from plait.planner import plan_baselines
from plait.planner.plan_leaders import Candidate, Leaders, State
from plait.planner.plan_moves import Moves
from plait.planner.plan_objective import Objective, Valued
from plait.planner.plan_problem import PlanProblem
from plait.planner.plan_space import PlanSpace
from plait.simulator.places import Place

BETAS = (40.0, 40.0, 100.0, inf)
"""One beta for each chain: a plan that is worse by a share s of the best is accepted with probability exp(-beta s)."""
PATIENCE = 120
"""Plans that a chain tries without improvement before it starts anew."""
MOST_EXHAUSTIVE = 25_000
"""Plans of a space that is tried in whole, most of them by their bound alone."""
MOST_PLAYED = 4000
"""The same, where bounds rule nothing out."""
MOST_TRIES = 10
"""Tries for each plan of the budget: those that are known, or that their bound rules out, are no evaluations. Of large
models on eight devices or more a search makes three to five, of small ones on few devices up to sixty."""

Stop = Literal["exhaustive", "evaluations", "seconds", "asked"]


@dataclass(frozen=True)
class SearchResult:
    """
    best:       None: no plan fits, or leaves no device idle
    nearest:    the plan of the least value, whether it can be used or not
    leaders:    the best usable plan of each kind, of the kinds whose best are best; `best` first
    baselines:  by name, valued as `best` was
    trace:      (evaluations, value) whenever the best got better
    stopped_by: `exhaustive`: no plan that was not tried can be better
    """

    best: Candidate | None
    nearest: Candidate | None
    leaders: tuple[Candidate, ...]
    baselines: tuple[Candidate, ...]
    evaluations: int
    seconds: float
    trace: tuple[tuple[int, float], ...]
    stopped_by: Stop


@dataclass
class Budget:
    """evaluations (and MOST_TRIES times as many tries) and seconds, whichever is spent first; `asked`: somebody wants
    it to end; `tell`: is given what is being done, many times"""

    evaluations: int = 20_000
    seconds: float = inf
    clock: Callable[[], float] = time.monotonic
    asked: Callable[[], bool] = lambda: False
    tell: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Engine:
    """What a search is made of.

    betas: of the chains; 0 accepts every plan, infinity none that is worse
    moves: proposes plans of a space; objective: values plans of a problem
    """

    betas: Sequence[float] = BETAS
    moves: Callable[[PlanSpace], Moves] = Moves
    objective: Callable[[PlanProblem], Objective] = Objective


def search(
    problem: PlanProblem,
    budget: Budget | None = None,
    *,
    seed: int = 0,
    given: Sequence[tuple[str, State]] = (),
    space: PlanSpace | None = None,
    engine: Engine = Engine(),
) -> SearchResult:
    """The best plan found.

    Args:
        given: further baselines by name, in places of `space`.
        space: of the problem, where plans of it are at hand.
        engine: what `plait` searches with, unless parts of it are compared.
    """
    return _Search(problem, space or PlanSpace(problem), budget or Budget(), seed, engine).run(given)


@dataclass
class _Chain:
    """One walk. rng: its own, so that what it tries depends on nothing else"""

    beta: float
    rng: Random
    state: State
    value: float
    best: float = inf
    waited: int = 0


@dataclass
class _Search:
    problem: PlanProblem
    space: PlanSpace
    budget: Budget
    seed: int
    engine: Engine
    nearest: Candidate | None = None
    best: Candidate | None = None
    trace: list[tuple[int, float]] = field(default_factory=list)

    def run(self, given: Sequence[tuple[str, State]]) -> SearchResult:
        began = self.budget.clock()
        self.objective = self.engine.objective(self.space.problem)
        self.moves = self.engine.moves(self.space)
        self.leaders = Leaders(self.problem.costs.cluster)
        named = [*plan_baselines.baselines(self.space).items(), *given]
        baselines = tuple(Candidate(places, self.valued(places), name) for name, places in named)
        self._began = self.budget.clock()
        plans = list(self._whole_space())
        stopped_by = self._sweep(plans) if plans else self._walk([places for _, places in named])
        for candidate in baselines:
            self._keep(candidate)
        return SearchResult(
            self.best,
            self.nearest,
            self.leaders.ordered(self.best),
            baselines,
            self.objective.evaluations,
            self.budget.clock() - began,
            tuple(self.trace),
            stopped_by,
        )

    def valued(self, places: State) -> Valued:
        valued = self.objective(places)
        self._keep(Candidate(places, valued))
        best = "" if self.best is None else f", the best takes {self.best.valued.value:.4g} s a step"
        count = self.objective.evaluations
        self.budget.tell(f"{count:,} plan{'s' * (count != 1)} tried{best}")
        return valued

    def _keep(self, candidate: Candidate) -> None:
        valued = candidate.valued
        if self.nearest is None or valued.value < self.nearest.valued.value:
            self.nearest = candidate
        if not valued.usable:
            return
        if self.best is None or valued.value < self.best.valued.value:
            self.best = candidate
            self.trace.append((self.objective.evaluations, valued.value))
        self.leaders.keep(candidate)

    def _stop(self, evaluations: float) -> Stop | None:
        if self.objective.evaluations >= evaluations:
            return "evaluations"
        if self.budget.asked():
            return "asked"
        if self.budget.clock() - self._began >= self.budget.seconds:
            return "seconds"
        return None

    def _whole_space(self) -> Iterator[State]:
        """All plans, if they are few; nothing else."""
        graph, space = self.space.graph, self.space
        slots = range(len(graph.slots))
        most = MOST_EXHAUSTIVE if self.objective.has_bounds else MOST_PLAYED
        ways = [sum(len(space.forms.of(slot, ranks)) for ranks in space.meshes) for slot in slots]
        if self._num_plans(ways) > most:
            return  # seen before divisions are asked for, some of which are played
        ways = [sum(space.num_ways(slot, ranks) for ranks in space.meshes) for slot in slots]
        if self._num_plans(ways) > most:
            return
        choices: list[list[Place]] = []
        for slot in slots:
            beside = product(space.afters(slot), space.meshes)
            choices.append([place for after, ranks in beside for place in space.ways(slot, ranks, after)])
        yield from dict.fromkeys(space.lawful(places) for places in product(*choices))

    def _num_plans(self, ways: Sequence[int]) -> int:
        """How many there are if each slot has so many ways to be computed."""
        return prod(count * len(self.space.afters(slot)) for slot, count in enumerate(ways))

    def _sweep(self, plans: Sequence[State]) -> Stop:
        """Value the plans of a space, those first that may take least, until none that is left can be a leader."""
        bounds = [self.objective.bound(places) for places in plans]
        for number in sorted(range(len(plans)), key=bounds.__getitem__):
            if bounds[number] >= self.leaders.worst:
                break
            if self.objective.if_it_fits(plans[number]) < self.leaders.worst:
                self.valued(plans[number])
            if (stop := self._stop(inf)) is not None:
                return stop
        return "exhaustive"

    def _walk(self, starts: Sequence[State]) -> Stop:
        chains = self._chains(starts)
        tries = 0
        if not chains:
            return "exhaustive"
        while True:
            if (stop := self._stop(self.budget.evaluations)) is not None:
                return stop
            if tries >= MOST_TRIES * self.budget.evaluations:  # nearly all that is near has been tried
                return "evaluations"
            turn, leads = divmod(tries, 2)
            self._step(min(chains, key=lambda chain: chain.value) if leads else chains[turn % len(chains)], starts)
            tries += 1

    def _chains(self, starts: Sequence[State]) -> list[_Chain]:
        chains = []
        for number, beta in enumerate(self.engine.betas):
            rng = Random(f"{self.seed} {number}")
            state = self.moves.greedy() if number == 0 else self.moves.random(rng)
            if number in (1, 2) and starts:
                state = min(starts, key=lambda start: self.objective(start).value)
            if state is None:
                return []
            chains.append(_Chain(beta, rng, state, self.valued(state).value))
        return chains

    def _step(self, chain: _Chain, starts: Sequence[State]) -> None:
        """Try a plan near the chain's; start anew where nothing has got better for long."""
        if chain.waited >= PATIENCE:
            self._restart(chain, starts)
        tried = self.moves.near(chain.state, chain.rng)
        chain.waited += 1
        if tried == chain.state:
            return
        # How much worse a plan may be to be accepted is drawn before it is valued: most need not be simulated then.
        least = self.nearest.valued.value if self.nearest is not None else chain.value
        most = chain.value + (-log(1.0 - chain.rng.random()) / chain.beta * least if chain.beta > 0 else inf)
        if self.objective.bound(tried) > most:
            return
        # What it lacks of memory makes it worth less: that is counted only where it may still be accepted, or kept.
        value = self.objective.if_it_fits(tried)
        if value <= max(most, chain.best, self.leaders.worst):
            value = self.valued(tried).value
        if value <= most:
            chain.state, chain.value = tried, value
        if value < chain.best * (1 - 1e-9):
            chain.best, chain.waited = value, 0

    def _restart(self, chain: _Chain, starts: Sequence[State]) -> None:
        rng = chain.rng
        kind = rng.random()
        state: State | None
        if kind < 0.5 and self.nearest is not None:
            state = (self.best or self.nearest).places
            for _ in range(rng.randint(2, 5)):
                state = self.moves.near(state, rng)
        elif kind < 0.65 and starts:
            state = rng.choice(list(starts))
        else:
            state = self.moves.random(rng)
        assert state is not None, "a space that has plans has random ones"
        chain.state, chain.value = state, self.valued(state).value
        chain.best, chain.waited = chain.value, 0
