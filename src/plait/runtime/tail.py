"""The end of a rollout, when few samples are unfinished: they are gathered, and ranks without any are free to score.

With `fusion: auto` a gate says when: by what the last steps took and how long their responses were. What it decided is
kept in the run's folder, and a run that is resumed decides the same again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plait.engines import GenerationEngine, InstanceMoves
from plait.policy.fusion_gate import Choice, Seen, choose, gain_s, line_through
from plait.policy.migration import AT_ONCE, HowToMove, MoveTimes
from plait.policy.step import Key
from plait.recipes.recipe import Recipe
from plait.runtime.decisions import Decisions
from plait.schedule.dispatch import Task
from plait.schedule.timeline import Timeline
from plait.schedule.work import COMPUTE

LENGTHS_OF_STEPS = 4
"""Steps whose responses say how long those of the next will be."""
STEPS_OF_A_MOVE = 2
"""Decode steps that a move counts as before there was one."""


class FusionGate:
    """What a run knows to decide by, and what it has decided.

    Args:
        path: the file of its decisions; what is there was decided before, by the run that is resumed.
        lengths: of responses of its last steps.
        times: what moves take; None: they go at once.
    """

    def __init__(self, path: Path, lengths: Sequence[Sequence[int]] = (), times: MoveTimes | None = None) -> None:
        self._decisions, self.times = Decisions(path), times
        self._lengths: deque[tuple[int, ...]] = deque(map(tuple, lengths), maxlen=LENGTHS_OF_STEPS)
        self._seen: Seen | None = None
        self._move_s: float | None = None
        for row in self._decisions.rows:
            self._seen = Seen(**row["seen"]) if row["seen"] else self._seen
            self._move_s = row["move_s"] or self._move_s

    def judge(self, step: int, call: str, batch: int, instances: int, max_batch: int) -> Judge:
        """What decides in a rollout of `batch` samples; `step` counts from 0."""
        before = self._decisions.of((step + 1, call))
        lengths = tuple(length for one in self._lengths for length in one)
        if before is not None:
            choice = Choice(before["moved_at"], before["gain_s"], before["needed_s"], before["why"])
        else:
            choice = choose(self._seen, lengths, batch, instances, max_batch, seed=step)
        return Judge(self, (step + 1, call), choice, self._seen, lengths, before)

    def learn(self, timeline: Timeline, lengths: Sequence[int], instances: int) -> None:
        """After a step.

        Args:
            timeline: what every rank did in it.
            lengths: of its responses.
            instances: that generate.
        """
        self._lengths.append(tuple(lengths))
        steps = [(span.tokens, span.duration_s) for span in timeline.spans if span.kind == "DECODE" and span.tokens]
        ranks = {span.rank for span in timeline.spans if span.kind == "DECODE"}
        scored = sum(
            span.duration_s
            for span in timeline.spans
            if span.kind == "SCORE" and span.rank in ranks and span.lane == COMPUTE
        )
        if not steps or not lengths:
            return
        fixed_s, each_s = line_through(steps)
        wide = max(1, len(ranks) // max(1, instances))
        move_s = STEPS_OF_A_MOVE * (fixed_s + each_s) if self._move_s is None else self._move_s
        score_s = scored / len(lengths) / wide
        self._seen = Seen(fixed_s, each_s, score_s, move_s, timeline.makespan_s)

    def keep(self, key: tuple[int, str], row: dict[str, Any], move_s: float | None) -> None:
        """A rollout has ended, and what was decided in it is written."""
        self._move_s = move_s or self._move_s
        self._decisions.keep(key, row)


class Judge:
    """Says of one rollout whether to gather what is left, each time that a sample has ended."""

    def __init__(
        self,
        gate: FusionGate,
        key: tuple[int, str],
        choice: Choice,
        seen: Seen | None,
        lengths: Sequence[int],
        before: Mapping[str, Any] | None,
    ) -> None:
        self._gate, self._key, self._choice, self._seen, self._lengths = gate, key, choice, seen, lengths
        self._before = before
        """What a run before this one decided in it; None: none did."""
        self._moved_at = 0
        self._how = AT_ONCE

    def gathers(self, running: Sequence[int], steps_done: int, waiting_s: float, max_batch: int) -> bool:
        """
        Args:
            running: unfinished samples of each instance.
            steps_done: of generation, about.
            waiting_s: instance seconds for which others have been free already.
        """
        left = sum(running)
        if not 0 < left <= self._choice.threshold:
            return False
        if self._before is None:
            assert self._seen is not None, "a threshold of nothing"
            if gain_s(self._seen, self._lengths, running, steps_done, waiting_s, max_batch) < self._seen.needed_s:
                return False
        self._moved_at = left
        return True

    def score_s(self) -> float:
        """Seconds of scoring a sample, by one instance."""
        return 0.0 if self._seen is None else self._seen.score_s

    def steps_in(self, seconds: float, running: Sequence[int]) -> float:
        """Steps of generation in so many seconds, of the instance with the most samples."""
        each = 0.0 if self._seen is None else self._seen.decode_s(max(running))
        return seconds / each if each > 0 else 0.0

    def how(self, contexts: Mapping[Key, int]) -> HowToMove:
        """How the samples move that are gathered now.

        Args:
            contexts: of each its tokens, about.
        """
        if self._before is not None:
            keys = frozenset((uid, index) for uid, index in self._before.get("recompute", ()))
            self._how = HowToMove(keys, self._before.get("ahead", False))
        elif self._gate.times is not None and self._seen is not None:
            self._how = self._gate.times.how(contexts, self._seen.decode_s(len(contexts)))
        return self._how

    def end(self, num_moved: int, move_s: float | None) -> None:
        seen = None if self._seen is None else asdict(self._seen)
        row = asdict(self._choice) | {"seen": seen}
        row |= {"moved_at": self._moved_at if num_moved else 0, "moved": num_moved, "move_s": move_s}
        row |= {"recompute": [list(key) for key in sorted(self._how.recompute)], "ahead": self._how.ahead}
        self._gate.keep(self._key, row, move_s if num_moved else None)


class Tail:
    """
    Args:
        task: of the rollout, which keeps the ranks busy that still generate.
        moves: of the engine.
        batch: samples of the rollout → tokens of their prompts.
        judge: says when samples are gathered, and how; None: the recipe's share says when, and they go at once.
    """

    def __init__(
        self,
        task: Task,
        engine: GenerationEngine,
        moves: InstanceMoves,
        recipe: Recipe,
        batch: Mapping[Key, int],
        judge: Judge | None,
    ) -> None:
        self._task, self._batch = task, batch
        self._engine, self._moves = engine, moves
        self._judge = judge
        self._most = int(recipe.fusion * len(batch)) if isinstance(recipe.fusion, float) else 0
        self._max_batch = recipe.sampling.max_running
        self._count = self._unfinished = len(batch)
        self._steps = 0.0
        self._free_s = 0.0
        """Seconds that instances without samples have had, all together."""
        self._looked_at_s = time.perf_counter()
        self.num_moved = 0

    def look(self, finished: int) -> None:
        """After a step of the engine that has finished so many samples."""
        self._unfinished -= finished
        now = time.perf_counter()
        running = self._engine.running
        if self._judge is not None and running:
            self._steps += self._judge.steps_in(now - self._looked_at_s, running)
        self._free_s += (now - self._looked_at_s) * sum(1 for one in running if one == 0)
        self._looked_at_s = now
        if finished and not self.num_moved and self._gathers(running):
            self._gather()
        self._task.release(self._task.mesh - self._engine.at_work)

    def _gathers(self, running: Sequence[int]) -> bool:
        if self._judge is None:
            return 0 < self._unfinished <= self._most
        waiting = (self._count - self._unfinished) * self._judge.score_s() - self._free_s
        return self._judge.gathers(running, int(self._steps), max(0.0, waiting), self._max_batch)

    def _gather(self) -> None:
        pairs = self._moves.gathering(self._max_batch)
        keys = [key for moved in pairs.values() for key in moved]
        how = AT_ONCE
        if keys and self._judge is not None:
            how = self._judge.how({key: self._batch[key] + int(self._steps) for key in keys})
        self.num_moved = self._moves.move(pairs, how) if pairs else 0

    def end(self) -> None:
        """All samples have ended."""
        if self._judge is not None:
            self._judge.end(self.num_moved, self._moves.moved_s)
