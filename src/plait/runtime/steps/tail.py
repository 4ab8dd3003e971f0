"""The end of a rollout, when few samples are unfinished: they are gathered, and ranks without any are free to score.

With `fusion: auto` a gate says when: by what the last steps took and how long their responses were. What it decided is
kept in the run's folder, and a run that is resumed decides the same again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from plait.engines import GenerationEngine
from plait.policy.decode_pace import decode_pace
from plait.policy.early_scores import EarlyScores, predicted
from plait.policy.fusion_gate import LEAST_SHARE, Choice, Remaining, RolloutSize, Seen, best_kept, choose
from plait.policy.migration import AT_ONCE, Bounds, HowToMove
from plait.policy.step import Key
from plait.runtime.folder.decisions import CallOfStep, Experience
from plait.runtime.steps.gates import LOOKING, Decides
from plait.schedule.dispatch import Task
from plait.schedule.fusion_times import FusionTimes
from plait.schedule.timeline import Span, Timeline
from plait.schedule.work import COMPUTE


class FusionGate:
    """A `Gate` that decides by what the last steps took.

    Args:
        experience: what the run decides by.
        times: settings of the plan's policy.
    """

    def __init__(self, experience: Experience, times: FusionTimes) -> None:
        self.experience = experience
        self._times = times
        self._early: dict[tuple[int, str], EarlyScores] = {}
        seen = [row["seen"] for row in experience.decisions.rows if row["seen"]]
        self._seen = Seen(**seen[-1]) if seen else None

    def early(self, step: int, call: str, size: RolloutSize) -> EarlyScores:
        """Whether the samples of a rollout are scored in parts, and groups split; `step` counts from 0. It follows
        from the plan and from the lengths that are known in every run when this may be asked first."""
        key, count = (step, call), size.together
        if key not in self._early:
            rows = self.experience.lengths_before(step)
            groups = [row[at : at + count] for row in rows for at in range(0, len(row), count)]
            self._early[key] = early = predicted(self._times, groups, size, seed=step)
            if not early.pays:
                why = "scoring in parts would gain too little" if rows else "no step was done yet"
                choice = Choice(0, early.gain_s, LEAST_SHARE * early.of_s, why)
                self.experience.keep((step + 1, call), _row(choice, None), None)
        return self._early[key]

    def deciding(self, step: int, call: str, size: RolloutSize) -> ByExperience:
        """What decides in a rollout; `step` counts from 0."""
        return ByExperience(self.experience, (step + 1, call), self._seen, size)

    def learn(self, timeline: Timeline, lengths: Sequence[int], instances: int) -> None:
        self.experience.heard(lengths)
        pace = decode_pace(timeline)
        ranks = {span.rank for span in timeline.spans if span.kind == "DECODE"}
        if pace is None or not lengths:
            return
        spans = [span for span in timeline.spans if span.rank in ranks]
        scores = [span for span in spans if span.kind == "SCORE" and span.lane == COMPUTE]
        roles = {span.role for span in scores}
        loaded_s = sum(span.duration_s for span in spans if span.kind == "ONLOAD" and span.role in roles)
        fixed_s, each_s, tokens = pace
        wide = max(1, len(ranks) // max(1, instances))
        move_s = self.experience.move_s(tokens * (fixed_s + each_s))
        score_s = _scored_s(scores) / len(lengths) / wide
        self._seen = Seen(fixed_s, each_s, score_s, move_s, timeline.makespan_s, loaded_s / len(ranks), tokens)


class ByExperience:
    """Decides for one rollout by what the last steps took, or as an earlier stay of the run decided. See `Decides`.

    Args:
        key: the rollout.
        seen: what the last steps took; None: there were none.
    """

    def __init__(self, experience: Experience, key: CallOfStep, seen: Seen | None, size: RolloutSize) -> None:
        self._experience, self._key, self._seen, self._size = experience, key, seen, size
        self._lengths = tuple(experience.lengths)
        """Lengths of the responses of the last steps."""
        self._before = before = experience.decisions.of(key)
        """What an earlier stay of the run decided in this rollout, which is decided again; None: nothing."""
        if before is not None:
            self._choice = Choice(before["moved_at"], before["gain_s"], before["needed_s"], before["why"])
        else:
            self._choice = choose(seen, self._lengths, size, seed=key[0] - 1)
        self.clock = experience.clock
        self._moved_at = self._kept = 0
        self._how = AT_ONCE

    @property
    def threshold(self) -> int:
        return self._choice.threshold

    def gathers(self, left: Remaining) -> int:
        if self._before is not None:
            kept = self._before.get("kept") or left.kept  # rows of earlier versions say nothing: it was the least
        else:
            assert self._seen is not None, "a threshold of nothing"
            kept = best_kept(self._seen, self._lengths, left, self._size)
        if kept:
            self._moved_at, self._kept = sum(map(len, left.unfinished)), kept
        return kept

    def score_s(self) -> float:
        return 0.0 if self._seen is None else self._seen.score_s

    def how(self, contexts: Mapping[Key, int]) -> HowToMove:
        if self._before is not None:
            keys = frozenset((uid, index) for uid, index in self._before.get("recompute", ()))
            self._how = HowToMove(keys, self._before.get("ahead", False))
        elif self._seen is not None:
            self._how = self._experience.how(contexts, self._seen.decode_s(len(contexts)))
        return self._how

    def end(self, num_moved: int, move_s: float | None) -> None:
        moved_at = self._moved_at if num_moved else 0
        row = _row(self._choice, self._seen, moved_at, num_moved, move_s, self._how)
        row |= {"kept": self._kept if num_moved else 0, "split": self._size.num_split}
        self._experience.keep(self._key, row, move_s if num_moved else None)


def _row(
    choice: Choice,
    seen: Seen | None,
    moved_at: int = 0,
    moved: int = 0,
    move_s: float | None = None,
    how: HowToMove = AT_ONCE,
) -> dict[str, Any]:
    """A row of the file of decisions: what was decided in a rollout, by what, and what came of it."""
    row = asdict(choice) | {"seen": None if seen is None else asdict(seen)}
    row |= {"moved_at": moved_at, "moved": moved, "move_s": move_s}
    return row | {"recompute": [list(key) for key in sorted(how.recompute)], "ahead": how.ahead}


@dataclass(frozen=True)
class Batch:
    """The samples of a rollout. prompts: sample → tokens of its prompt; per_prompt: samples of each; num_split: as
    `RolloutSize` has it"""

    prompts: Mapping[Key, int]
    per_prompt: int
    num_split: int = 0


class Tail:
    """The last samples of one rollout: looks after each step of the engine whether to gather them, and frees the ranks
    that have none left.

    Args:
        task: of the rollout, which keeps the ranks busy that still generate.
        engine: whose samples may move.
        bounds: of an instance.
        decides: who says when samples are gathered, and how.
    """

    def __init__(self, task: Task, engine: GenerationEngine, batch: Batch, bounds: Bounds, decides: Decides) -> None:
        assert engine.moves is not None, "nothing can be gathered"
        self._task, self._batch, self._bounds = task, batch, bounds
        self._engine, self._moves = engine, engine.moves
        self._decides = decides
        self._unfinished = len(batch.prompts)
        self._open = {uid for uid, _ in batch.prompts}
        """Prompts whose samples nobody can have scored yet."""
        self._split_off: Counter[int] | None = None
        """Prompts that were split → samples that are scored without the others; None: none was yet."""
        self._waiting_s = 0.0
        """Instance seconds of scoring that could be done, were instances free."""
        self._looked_at_s = self._may_look_at_s = decides.clock()
        self.num_moved = 0

    def look(self, finished: int) -> None:
        """After a step of the engine that has finished so many samples."""
        self._unfinished -= finished
        running = self._engine.running
        now = self._decides.clock()
        free = sum(1 for count in running if count == 0)
        self._waiting_s = max(0.0, self._waiting_s - (now - self._looked_at_s) * free)
        self._looked_at_s = now
        if finished and not self.num_moved:
            self._gather()
        self._task.release(self._task.mesh - self._engine.at_work)

    def _gather(self) -> None:
        unfinished = [[uid for uid, _ in keys] for keys in self._moves.unfinished]
        ended = self._open.difference(*unfinished)
        self._open -= ended
        self._waiting_s += self._scorable(ended, unfinished) * self._decides.score_s()
        if 0 < self._unfinished <= self._decides.threshold and self._looked_at_s >= self._may_look_at_s:
            self._look(unfinished)
            seen_s = self._decides.clock()
            self._may_look_at_s = seen_s + (seen_s - self._looked_at_s) / LOOKING

    def _look(self, unfinished: Sequence[Sequence[int]]) -> None:
        """Have the samples move, if that pays.

        Args:
            unfinished: of each instance the prompts of its samples.
        """
        pairs = self._moves.gathering(self._bounds)
        if not pairs:
            return
        least = sum(map(bool, unfinished)) - len({source for source, _ in pairs})
        said = self._engine.said
        tokens = [[said.get(key, 0) for key in keys] for keys in self._moves.unfinished]
        kept = self._decides.gathers(Remaining(unfinished, tokens, self._waiting_s, least))
        if kept > least:
            pairs = self._moves.gathering(self._bounds, kept)
        if kept and pairs:
            keys = [key for moved in pairs.values() for key in moved]
            how = self._decides.how({key: self._batch.prompts[key] + said.get(key, 0) for key in keys})
            self.num_moved = self._moves.move(pairs, how)

    def _scorable(self, ended: Collection[int], unfinished: Sequence[Sequence[int]]) -> int:
        """Samples that can be scored from now on.

        Args:
            ended: prompts whose last sample has ended.
            unfinished: prompts of the others.
        """
        per_prompt, before = self._batch.per_prompt, self._split_off or Counter()
        count = sum(per_prompt - before[uid] for uid in ended)
        if self._split_off is None and self._unfinished <= self._batch.num_split:
            left = Counter(uid for uids in unfinished for uid in uids)
            self._split_off = Counter({uid: per_prompt - number for uid, number in left.items()})
            count += self._split_off.total()
        return count

    def end(self) -> None:
        """All samples have ended."""
        self._decides.end(self.num_moved, self._moves.moved_s)


def _scored_s(spans: Sequence[Span]) -> float:
    """Seconds of all these scores, had each model taken as long for a token as in the middle one of its own: some are
    held up, and the first of a run takes longer."""
    of_call: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        of_call[span.whole].append(span)
    total_s = 0.0
    for scores in of_call.values():
        rates = [span.duration_s / span.tokens for span in scores if span.tokens]
        total_s += median(rates) * sum(span.tokens for span in scores) if rates else 0.0
    return total_s
