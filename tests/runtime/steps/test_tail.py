"""`fusion: auto` played with a virtual clock: the run's own gate and tail, over instances whose steps take what is
said.

What the gate has seen of steps is wrong by a fifth, in each term and each direction; it must never lose by that.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from typing import Any, cast

import pytest

from plait.policy.fusion_gate import WRONG, Remaining, RolloutSize, Seen
from plait.policy.migration import AT_ONCE, Bounds, HowToMove, InstanceLoad, Unfinished, decide
from plait.policy.step import Key
from plait.runtime.folder.decisions import Experience
from plait.runtime.steps.gates import AtThreshold, Decides
from plait.runtime.steps.tail import Batch, FusionGate, Tail
from plait.schedule.dispatch import Task
from plait.schedule.fusion_times import FusionTimes
from plait.schedule.timeline import Span, Timeline
from tests.cases import slow_but

PROMPTS, SAMPLES, INSTANCES, MAX_BATCH, STEPS = 8, 4, 2, 256, 3
CALLS = 3
"""Models that score."""
LEAST = 0.98


class Instances:
    """Engines without tensors, each a step at a time, and scoring by whoever has no samples left."""

    def __init__(self, truth: Seen, lengths: Mapping[Key, int], count: int = INSTANCES) -> None:
        self.truth, self.now_s, self.count = truth, 0.0, count
        self.lengths, self.left = lengths, dict(lengths)
        """Unfinished sample → tokens that it still lacks."""
        self.where = {key: key[0] % count for key in lengths}
        self.ended: dict[Key, float] = {}
        self.next_s = [truth.decode_s(n) for n in self.running]
        self.free_s = [0.0] * count
        self.moving: tuple[float, frozenset[int], dict[Key, int]] | None = None
        self.moved_s: float | None = None

    @property
    def running(self) -> tuple[int, ...]:
        counts = Counter(self.where[key] for key in self.left)
        return tuple(counts[place] for place in range(self.count))

    @property
    def unfinished(self) -> tuple[tuple[Key, ...], ...]:
        return tuple(tuple(key for key in self.left if self.where[key] == place) for place in range(self.count))

    @property
    def said(self) -> dict[Key, int]:
        return {key: self.lengths[key] - left for key, left in self.left.items()}

    @property
    def at_work(self) -> frozenset[int]:
        return frozenset(place for place, number in enumerate(self.running) if number)

    @property
    def moves(self) -> Instances:
        return self

    def gathering(self, bounds: Bounds, kept: int = 1) -> dict[tuple[int, int], list[Key]]:
        loads = [
            InstanceLoad(place, tuple(Unfinished(place * 1000 + k, 0, 0) for k in range(len(keys))), 1 << 40)
            for place, keys in enumerate(self.unfinished)
            if keys
        ]
        found = decide(loads, len(self.left), bounds.slots, kept) if len(loads) > 1 else None
        pairs: dict[tuple[int, int], list[Key]] = {}
        for move in () if found is None else found.moves:
            pairs.setdefault((move.source, move.target), []).append(self.unfinished[move.source][move.sample % 1000])
        return pairs

    def move(self, pairs: Mapping[tuple[int, int], Sequence[Key]], how: HowToMove = AT_ONCE) -> int:
        """When all of both sides have ended the step that they are at."""
        places = frozenset(place for pair in pairs for place in pair)
        targets = {key: target for (_, target), keys in pairs.items() for key in keys}
        self.moving = max(self.next_s[place] for place in places), places, targets
        return len(targets)

    def played(self) -> Iterator[int]:
        """Events, one after the other: how many samples have ended in each."""
        while self.left:
            due = [(self.next_s[place], (place,)) for place, number in enumerate(self.running) if number]
            if self.moving is not None:
                at, places, _ = self.moving
                due = [(at, tuple(places)), *(one for one in due if one[1][0] not in places)]
            self.now_s, places = min(due)
            finished = self._step(places)
            if self.moving is not None and set(places) == self.moving[1]:
                self._go_over(self.moving[2])
            yield finished

    def _step(self, places: Sequence[int]) -> int:
        finished = 0
        for key in [key for key in self.left if self.where[key] in places]:
            self.left[key] -= 1
            if self.left[key] <= 0:
                del self.left[key]
                self.ended[key] = self.now_s
                finished += 1
        for place in places:
            self.free_s[place] = self.now_s
            self.next_s[place] = self.now_s + self.truth.decode_s(self.running[place])
        return finished

    def _go_over(self, targets: Mapping[Key, int]) -> None:
        assert self.moving is not None
        self.where |= {key: place for key, place in targets.items() if key in self.left}
        for place in self.moving[1]:
            self.free_s[place] = self.now_s + self.truth.move_s
            self.next_s[place] = self.now_s + self.truth.move_s + self.truth.decode_s(self.running[place])
        self.moving, self.moved_s = None, self.truth.move_s

    @property
    def all_scored_s(self) -> float:
        """When the last group is scored, each by whichever instance is free first, as a run does."""
        whole: dict[int, float] = {}
        for (uid, _), end in self.ended.items():
            whole[uid] = max(end, whole.get(uid, end))
        work = [(whole[uid], uid, call) for call, uid in product(range(CALLS), whole)]
        free = [(at + self.truth.load_s, place) for place, at in enumerate(self.free_s)]
        heapq.heapify(free)
        end_s = 0.0
        while work:
            at, place = heapq.heappop(free)
            ready = [one for one in work if one[0] <= at]
            if not ready:
                heapq.heappush(free, (min(work)[0], place))
                continue
            chosen = min(ready, key=lambda one: (one[2], one[1]))
            work.remove(chosen)
            end_s = at + SAMPLES * self.truth.score_s / CALLS
            heapq.heappush(free, (end_s, place))
        return max(at for at, _ in free)


def off_s(truth: Seen, lengths: Mapping[Key, int]) -> float:
    """All scoring begins when all samples have ended, and is divided evenly."""
    instances = Instances(truth, lengths)
    for _ in instances.played():
        pass
    return max(instances.ended.values()) + truth.load_s + len(lengths) * truth.score_s / INSTANCES


def auto_s(truth: Seen, lengths: Mapping[Key, int], choice: Decides, begin_s: float = 0.0) -> tuple[float, int]:
    """(seconds until all is scored, samples that moved); `begin_s`: when samples begin that are asked for at 0."""
    instances = Instances(truth, lengths)
    nothing: Any = iter(())
    task = Task(((0, 0),), "generate", nothing, frozenset(range(INSTANCES)))
    engine: Any = instances
    choice.clock = lambda: instances.now_s
    tail = Tail(task, engine, Batch(dict.fromkeys(lengths, 8), SAMPLES), Bounds(MAX_BATCH, 200), choice)
    instances.now_s, instances.next_s = begin_s, [at + begin_s for at in instances.next_s]
    for finished in instances.played():
        tail.look(finished)
    tail.end()
    return instances.all_scored_s, tail.num_moved


def decode_spans(seen: Seen) -> list[Span]:
    """A step of each number of samples, in rows of four for each, of which half of the draft tokens are accepted; or,
    without drafts, of one for each."""
    drafts = seen.tokens > 1
    return [
        Span(
            f"actor.generate/decode{n}",
            *("DECODE", 0, 0.0, seen.decode_s(n)),
            tokens=4 * n if drafts else n,
            samples=n,
            drawn=round(seen.tokens * n),
        )
        for n in range(2, 18, 2)
    ]


def timeline_of(seen: Seen) -> Timeline:
    """What a step would have recorded, had it taken so long."""
    spans = decode_spans(seen)
    spans += [replace(span, rank=1) for span in spans]
    number = PROMPTS * SAMPLES
    spans += [
        Span(f"ref.logprobs/p{k}", "SCORE", k % 2, 0.0, seen.score_s, tokens=10, role="ref") for k in range(number)
    ]
    spans += [Span("ref.onload", "ONLOAD", rank, 0.0, seen.load_s, lane="link", role="ref") for rank in (0, 1)]
    return Timeline((*spans, Span("actor.train/mb0", "TRAIN", 0, 0.0, seen.step_s)), source="measured")


Draw = Callable[[random.Random], int]


def geometric(mean: float, limit: int) -> Draw:
    return lambda rng: next(n for n in count(1) if n == limit or rng.random() < 1 / mean)


def log_normal(sigma: float, limit: int) -> Draw:
    return lambda rng: min(limit, 1 + int(rng.lognormvariate(3.0, sigma)))


LENGTHS: dict[str, Draw] = {
    **{f"geometric {share:g} of {n}": geometric(share * n, n) for n in (64, 160) for share in (0.08, 0.15, 0.4, 1.0)},
    **{f"log-normal {sigma:g} to {n}": log_normal(sigma, n) for n in (96, 200) for sigma in (0.5, 1.0, 1.5)},
    "all alike": lambda rng: 40,
    "short or long": lambda rng: rng.choice((6, 6, 6, 90)),
    "one in twenty is long": lambda rng: 150 if rng.random() < 0.05 else 20 + rng.randrange(10),
}
TRUTHS = {
    # Two cores and a small model: a further sample costs, and three models score for longer than one generates.
    "scores long": Seen(0.0134, 0.002, 0.15, 0.1, 0.0),
    "scores as long": Seen(0.0134, 0.002, 0.06, 0.05, 0.0),
    "scores briefly, weights come back": Seen(0.0134, 0.002, 0.01, 0.03, 0.0, load_s=0.05),
    # A GPU: nearly all of a step is fixed.
    "fixed steps": Seen(0.004, 0.00005, 0.02, 0.01, 0.0),
}
WRONGS = [(1.0, 1.0, 1.0, 1.0), *product((1 - WRONG, 1 + WRONG), repeat=4)]


QUICK = [("scores briefly, weights come back", "short or long")]


@pytest.mark.parametrize(("costs", "name"), slow_but(QUICK, product(TRUTHS, LENGTHS)))
def test_auto_does_not_lose_where_what_was_measured_is_wrong(costs: str, name: str, tmp_path: Path) -> None:
    rng, truth, draw = random.Random(name), TRUTHS[costs], LENGTHS[name]
    drawn = [{key: draw(rng) for key in product(range(PROMPTS), range(SAMPLES))} for _ in range(4 + STEPS)]
    before, steps = drawn[:4], drawn[4:]
    off = [off_s(truth, lengths) for lengths in steps]
    for number, (fixed, each, score, move) in enumerate(WRONGS):
        seen = replace(
            truth,
            fixed_s=fixed * truth.fixed_s,
            each_s=each * truth.each_s,
            score_s=score * truth.score_s,
            load_s=score * truth.load_s,
            step_s=1.5 * max(off),
        )
        times = FusionTimes(truth.fixed_s + truth.each_s, truth.each_s, 0.0, 0.0, 0.0)
        gate = FusionGate(Experience(tmp_path / f"{number}.jsonl", [list(one.values()) for one in before]), times)
        gate.experience.keep((0, "actor.generate"), {"seen": None, "move_s": None}, move * truth.move_s)
        gate.learn(timeline_of(seen), [*before[-1].values()], INSTANCES)
        size = RolloutSize(PROMPTS * SAMPLES, INSTANCES, MAX_BATCH, SAMPLES)
        auto = [
            auto_s(truth, lengths, gate.deciding(step, "actor.generate", size)) for step, lengths in enumerate(steps)
        ]
        for without, (seconds, moved) in zip(off, auto, strict=True):
            assert without / seconds >= LEAST, f"{moved} moved, seen {fixed, each, score, move} of the truth"


def test_moves_that_took_long_are_not_made_again(tmp_path: Path) -> None:
    """Of a move that nobody has made it is believed that it takes two decode steps. When one took 3 s, the next rollout
    of the same lengths moves nothing; nor does that of a run that goes on from the same file."""
    truth, keys = TRUTHS["scores long"], list(product(range(PROMPTS), range(SAMPLES)))
    lengths = {key: 150 if key in keys[:: len(keys) // 3] else 20 for key in keys}
    size, times = RolloutSize(len(keys), INSTANCES, MAX_BATCH, SAMPLES), FusionTimes(0.02, 0.002, 0.0, 0.0, 0.0)
    before = [[*lengths.values()]] * 4

    def gate() -> FusionGate:
        found = FusionGate(Experience(tmp_path / "fusion.jsonl", before), times)
        found.learn(timeline_of(replace(truth, step_s=10.0)), before[0], INSTANCES)
        return found

    first = gate()
    choice = first.deciding(0, "actor.generate", size)
    assert choice.threshold > 0
    choice.end(3, 3.0)
    first.learn(timeline_of(replace(truth, step_s=10.0)), before[0], INSTANCES)
    assert first.deciding(1, "actor.generate", size).threshold == 0
    assert gate().deciding(1, "actor.generate", size).threshold == 0


def test_as_many_are_kept_as_gain_most_and_a_resumed_run_keeps_as_many(tmp_path: Path) -> None:
    """Four instances with a long sample each, which slow each other down. They are gathered in two, though one has
    room; a run that is resumed does the same, whatever it measures; and one whose file is older, as that did: in the
    least."""
    lengths = {(uid, 0): 100 if uid < 4 else 10 for uid in range(32)}
    size, times = RolloutSize(32, 4, MAX_BATCH), FusionTimes(0.02, 0.01, 0.0, 0.0, 0.0)
    truth = Seen(0.01, 0.005, 0.25, 0.0, 3.0)

    def kept_by(file: Path, seen: Seen) -> tuple[list[int], list[dict[str, Any]]]:
        known = Experience(file, [[*lengths.values()]] * 4)
        known.keep((0, "actor.generate"), {"seen": None, "move_s": 0.001}, 0.001)
        gate = FusionGate(known, times)
        gate.learn(timeline_of(seen), [*lengths.values()], 4)
        choice, instances = gate.deciding(0, "actor.generate", size), Instances(truth, lengths, 4)
        choice.clock = lambda: instances.now_s
        task = Task(((0, 0),), "generate", cast(Any, iter(())), frozenset(range(4)))
        bounds = Bounds(MAX_BATCH, 200)
        tail = Tail(task, cast(Any, instances), Batch(dict.fromkeys(lengths, 8), 1), bounds, choice)
        for finished in instances.played():
            tail.look(finished)
            running = instances.running
        tail.end()
        assert sum(running) == 0
        return [len({instances.where[uid, 0] for uid in range(4)})], known.decisions.rows

    places, rows = kept_by(tmp_path / "fusion.jsonl", truth)
    assert (places, rows[-1]["kept"], rows[-1]["moved"]) == ([2], 2, 2)
    slow = replace(truth, each_s=0.1)
    assert kept_by(tmp_path / "fusion.jsonl", slow)[0] == [2]
    assert kept_by(tmp_path / "other.jsonl", slow)[0] == [4]
    older = {name: value for name, value in rows[-1].items() if name != "kept"}
    (tmp_path / "older.jsonl").write_text(json.dumps(older) + "\n")
    assert kept_by(tmp_path / "older.jsonl", slow)[0] == [1]


def test_samples_that_began_late_are_gathered_as_well(tmp_path: Path) -> None:
    """Weights and prompts took 100 s; by the clock each sample could have ended long ago."""
    truth, keys = TRUTHS["scores long"], list(product(range(PROMPTS), range(SAMPLES)))
    lengths = {key: 150 if key in keys[:: len(keys) // 3] else 20 for key in keys}
    size, moved = RolloutSize(len(keys), INSTANCES, MAX_BATCH, SAMPLES), []
    for begin_s in (0.0, 100.0):
        known = Experience(tmp_path / f"{begin_s}.jsonl", [[*lengths.values()]] * 4)
        gate = FusionGate(known, FusionTimes(0.02, 0.002, 0.0, 0.0, 0.0))
        gate.learn(timeline_of(replace(truth, step_s=10.0)), [*lengths.values()], INSTANCES)
        moved.append(auto_s(truth, lengths, gate.deciding(0, "actor.generate", size), begin_s)[1])
    assert moved[0] == moved[1] > 0


def test_steps_with_drafts_decide_as_plain_ones_that_bring_as_many_tokens(tmp_path: Path) -> None:
    """Steps of 2.5 tokens, each 2.5 times as long: a token of each sample takes the same, and a move of two steps 2.5
    times as long."""
    size, before = RolloutSize(16, INSTANCES, MAX_BATCH, 2), [[50 * n for n in range(1, 9)]]
    rows = []
    for tokens, move_s in ((1.0, 0.02), (2.5, 0.02), (2.5, None)):
        known = Experience(tmp_path / f"{len(rows)}.jsonl", before)
        known.keep((0, "actor.generate"), {"seen": None, "move_s": move_s}, move_s)
        gate = FusionGate(known, FusionTimes(0.02, 0.002, 0.0, 0.0, 0.0))
        gate.learn(timeline_of(Seen(0.004, 0.0016, 0.2, 0.0, 3.0, tokens=tokens)), before[0], INSTANCES)
        choice = gate.deciding(0, "actor.generate", size)
        choice.end(0, None)
        rows.append(known.decisions.of((1, "actor.generate")) or {})
    plain, drafted, unmeasured = rows
    assert plain["threshold"] > 0
    assert drafted["threshold"] == plain["threshold"]
    assert (drafted["gain_s"], drafted["needed_s"]) == pytest.approx((plain["gain_s"], plain["needed_s"]))
    assert unmeasured["seen"]["move_s"] == pytest.approx(2 * 2.5 * (0.004 + 0.0016))


@pytest.mark.parametrize(("takes_s", "times"), [(0.0, 7), (0.002, 3), (10.0, 1)])
def test_the_end_is_looked_at_in_a_twentieth_of_the_time(takes_s: float, times: int) -> None:
    """One of two instances has a long sample, the other eight that end one by one, every 20 ms. To decide takes no
    time; or 2 ms, so that the next 40 ms are left alone; or longer than all that follows."""
    seen: list[Remaining] = []
    instances = Instances(Seen(0.02, 0.0, 0.0, 0.0, 0.0), {(1, 0): 100, **{(0, k): k + 1 for k in range(8)}})

    class Judges(AtThreshold):
        def gathers(self, left: Remaining) -> int:
            seen.append(left)
            instances.now_s += takes_s
            return 0

    nothing, engine = cast(Any, iter(())), cast(Any, instances)
    task = Task(((0, 0),), "generate", nothing, frozenset(range(INSTANCES)))
    batch, bounds = Batch(dict.fromkeys(instances.left, 8), SAMPLES), Bounds(MAX_BATCH, 200)
    tail = Tail(task, engine, batch, bounds, Judges(9, lambda: instances.now_s))
    for finished in instances.played():
        tail.look(finished)
    assert len(seen) == times
    assert seen[0].said == [[1] * 7, [0]], "the other instance has ended no step yet"


@pytest.mark.parametrize("threshold", [0, 1, 4])
def test_a_share_that_is_named_gathers_what_is_left_once_and_at_once(threshold: int) -> None:
    """One long sample on each instance: both are left at the end, one of them goes to the other's."""
    truth = TRUTHS["scores long"]
    keys = list(product(range(PROMPTS), range(SAMPLES)))
    lengths = {key: 80 if key in (keys[0], keys[-1]) else 20 for key in keys}
    seconds, moved = auto_s(truth, lengths, AtThreshold(threshold))
    assert moved == (1 if threshold >= 2 else 0)
    assert (seconds < off_s(truth, lengths)) == (moved > 0)
