"""Samples that instances give to others during a rollout (`rebalance: auto`), so that all end at about the same time.

What a token of each sample takes is fitted to the decode steps of the run's last step; how long samples will be is
told by the lengths of its last steps: any of those that are longer than what an instance's samples have said. What was
decided is kept in the run's folder, and a run that is resumed decides the same again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.engines import GenerationEngine, InstanceMoves
from plait.policy.decode_pace import decode_pace
from plait.policy.migration import Bounds, HowToMove
from plait.policy.rebalance import InstanceWork, MoveCost, UnfinishedSample, chances_of, rebalance
from plait.policy.step import Key
from plait.runtime.folder.decisions import CallOfStep, Experience
from plait.runtime.steps.gates import LOOKING
from plait.schedule.timeline import Timeline

TOKENS_BETWEEN = 32
"""Tokens of a sample of the fastest instance, after which ends are predicted again; or when an instance has half of the
samples left that it had then."""
TOKENS_BETWEEN_SHORT = 8
"""The same where samples that move stand still for less than a step: then it pays to move fewer at a time, later."""


@dataclass(frozen=True)
class Curve:
    """
    fixed_s, each_s: seconds until each sample of an instance has a token more, and more for each sample that runs
    move_s: in which samples that move stand still
    tokens: that a sample gets in a decode step, in the mean
    """

    fixed_s: float
    each_s: float
    move_s: float
    tokens: float = 1.0

    def token_s(self, running: float, context: float) -> float:
        """See policy.rebalance.StepSeconds; what contexts add is part of the fit."""
        return self.fixed_s + self.each_s * running

    def step_s(self, running: float) -> float:
        """Seconds of a decode step of so many samples."""
        return self.tokens * self.token_s(running, 0.0)


class Rebalancer:
    """Decides in each rollout which samples move.

    Args:
        experience: what the run decides by.
    """

    def __init__(self, experience: Experience) -> None:
        self.experience = experience
        curves = [row["curve"] for row in experience.decisions.rows if row["curve"]]
        self.curve = Curve(**curves[-1]) if curves else None

    def balance(
        self, key: CallOfStep, engine: GenerationEngine, prompts: Mapping[int, int], bounds: Bounds
    ) -> Balance | None:
        """What decides in one rollout; None: the engine moves no samples.

        Args:
            prompts: uid → tokens, of all that are generated for.
        """
        return None if engine.moves is None else Balance(self, key, engine, engine.moves, prompts, bounds)

    def learn(self, timeline: Timeline, lengths: Sequence[int]) -> None:
        """After a step.

        Args:
            timeline: what every rank did in it.
            lengths: of its responses.
        """
        self.experience.heard(lengths)
        if (pace := decode_pace(timeline)) is not None:
            fixed_s, each_s, tokens = pace
            self.curve = Curve(fixed_s, each_s, self.experience.move_s(tokens * (fixed_s + each_s)), tokens)


class Balance:
    """Looks at one rollout after each step of its engine, and has samples move."""

    def __init__(
        self,
        rebalancer: Rebalancer,
        key: CallOfStep,
        engine: GenerationEngine,
        moves: InstanceMoves,
        prompts: Mapping[int, int],
        bounds: Bounds,
    ) -> None:
        self._rebalancer, self._key, self._engine, self._moves = rebalancer, key, engine, moves
        self._prompts, self._bounds = prompts, bounds
        self._curve, self._lengths = rebalancer.curve, sorted(rebalancer.experience.lengths)
        before = rebalancer.experience.decisions.of(key)
        self._asked: deque[dict[str, Any]] | None = None if before is None else deque(before["moves"])
        """Moves that a run before this one has made, and that are made again."""
        self._made: list[dict[str, Any]] = []
        self._tokens = [0.0] * engine.traits.num_instances
        """That a sample of each instance could have said by now, about: what says when to look."""
        self._looked_at, self._looked_with = 0.0, (0,) * engine.traits.num_instances
        self._looked_at_s = self._may_decide_at_s = rebalancer.experience.clock()
        self._moved: set[Key] = set()
        self.num_moved = 0

    def look(self, *, frees: bool) -> None:
        """After a step of the engine.

        Args:
            frees: instances without samples have been given to others.
        """
        now = self._rebalancer.experience.clock()
        running = self._engine.running
        if self._curve is not None:
            for place, count in enumerate(running):
                if count:
                    token_s = self._curve.token_s(min(count, self._bounds.slots), 0.0)
                    self._tokens[place] += (now - self._looked_at_s) / token_s if token_s > 0 else 0.0
        self._looked_at_s = now
        if self._moves.is_moving:
            return
        if self._asked is not None:
            self._repeat(self._asked, sum(running))
        elif self._curve is not None and self._lengths and self._is_due(self._curve, running, now):
            self._looked_at, self._looked_with = max(self._tokens), running
            self._decide(self._curve, frees=frees)
            decided = self._rebalancer.experience.clock()
            self._may_decide_at_s = decided + (decided - now) / LOOKING

    def end(self) -> None:
        """All samples have ended."""
        curve = None if self._curve is None else vars(self._curve)
        move_s = self._moves.moved_s if self.num_moved else None
        self._rebalancer.experience.keep(self._key, {"moves": self._made, "curve": curve, "move_s": move_s}, move_s)

    def _is_due(self, curve: Curve, running: Sequence[int], now_s: float) -> bool:
        if now_s < self._may_decide_at_s:
            return False
        between = TOKENS_BETWEEN_SHORT if curve.move_s < curve.step_s(1) else TOKENS_BETWEEN
        if max(self._tokens) - self._looked_at >= between:
            return True
        return any(2 * now < then for now, then in zip(running, self._looked_with, strict=True))

    def _repeat(self, recorded: deque[dict[str, Any]], num_unfinished: int) -> None:
        """Repeat a recorded move once as few samples are left as when it was made. Samples that are elsewhere now stay,
        and so do those for instances that a resumed run does not have."""
        num_instances = len(self._tokens)
        while recorded and num_unfinished <= recorded[0]["left"]:
            move = recorded.popleft()
            pairs = {
                (source, target): [(uid, index) for uid, index in keys]
                for source, target, keys in move["pairs"]
                if target < num_instances
            }
            recompute = frozenset((uid, index) for uid, index in move.get("recompute", ()))
            self._move(pairs, move, HowToMove(recompute, move.get("ahead", False)))
            if self._moves.is_moving:
                return

    def _decide(self, curve: Curve, *, frees: bool) -> None:
        unfinished, said = self._moves.unfinished, self._engine.said
        works = [
            InstanceWork(
                place,
                tuple(self._growing(keys, said)),
                chances_of([said.get(key, 0) for key in keys], self._lengths, self._bounds.response),
                self._bounds.kv_tokens,
                takes=bool(keys) or not frees,
            )
            for place, keys in enumerate(unfinished)
        ]
        decision = rebalance(works, curve.token_s, self._bounds.slots, MoveCost(curve.move_s))
        pairs: dict[tuple[int, int], list[Key]] = {}
        for shift in decision.shifts:
            pairs.setdefault((shift.source, shift.target), []).append(shift.sample.key)
        if pairs:
            row = {"left": sum(map(len, unfinished)), "before_s": decision.before_s, "after_s": decision.after_s}
            row["pairs"] = [[*pair, [list(key) for key in keys]] for pair, keys in pairs.items()]
            contexts = {shift.sample.key: shift.sample.context for shift in decision.shifts}
            how = self._rebalancer.experience.how(contexts, curve.step_s(len(decision.shifts)))
            row |= {"recompute": [list(key) for key in sorted(how.recompute)], "ahead": how.ahead}
            self._move(pairs, row, how)

    def _growing(self, keys: Sequence[Key], said: Mapping[Key, int]) -> Iterator[UnfinishedSample]:
        """The samples of an instance; how long each is going to be nobody knows. Those that have said nothing yet, as
        far as is known, stay."""
        for key in keys:
            may_move = key in said and key not in self._moved
            yield UnfinishedSample(key, self._prompts[key[0]] + said.get(key, 0), may_move)

    def _move(self, pairs: Mapping[tuple[int, int], Sequence[Key]], row: dict[str, Any], how: HowToMove) -> None:
        """Have samples move, and remember it as this row of the run's decisions."""
        if count := self._moves.move(pairs, how):
            self.num_moved += count
            self._moved |= {key for keys in pairs.values() for key in keys}
            self._made.append(row)
