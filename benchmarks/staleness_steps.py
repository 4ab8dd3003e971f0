"""Seconds of a step where batches are generated ahead, simulated for unequal lengths: which samples a step waits for.

    python benchmarks/staleness_steps.py                        # some minutes of one core
    python benchmarks/staleness_steps.py --tiny --repeats 1     # does the benchmark itself work?

SIMULATED: no number here was measured, and load changes none. Batches of 64 groups of 8 samples; lengths are log-normal
(half of the variance of their logarithms is that of prompts), cut at the longest; 512 samples run at a time, and a
decode step of r samples takes 1 + r / 250. Training a batch takes `--train` of the time in which all places full would
draw it, by its tokens. Generation and training have devices of their own, or share them (`--shared`).

    wait n          `max_staleness: n`: all that is drawn in a step ends in it
    keep n          `partial_rollout: keep` or `recompute`: samples of later batches halt when the step ends
    tokens n        the same with `tokens_per_version`: they halt after so many tokens, the longest response over n + 1
                    where devices are shared, else over n + 1/2
    m ahead, n old  m batches are generated ahead, and samples may be n versions old: a step trains on the groups that
                    are done `first` by the clock, or were done when it began (`tokens`: halting as above). Not built
                    (docs/adr/0113-samples-may-draw-so-many-tokens-of-each-version.md)

Printed per kind: seconds of a step over those of the longer side alone with all places full; versions that a group is
behind when it is trained on, the mean and the most; the mean over tokens; how unequal batches are in tokens (standard
deviation over mean).
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Literal, NamedTuple

from sides import positive, row

GROUPS, SAMPLES, PLACES, MEDIAN, PER_SAMPLE = 64, 8, 512, 200, 1 / 250
COLUMNS = ("step", "versions", "most", "of tokens", "unequal")


class Kind(NamedTuple):
    """ahead: batches that are open beside the step's own; oldest: versions that a group may be behind; tokens: that a
    sample draws in a step that does not train on it; choice: which groups a step trains on"""

    name: str
    ahead: int
    oldest: int
    tokens: float = math.inf
    choice: Literal["in order", "done first", "done before"] = "in order"


class Sizes(NamedTuple):
    """sigma: of the logarithms of lengths; train: seconds of training a batch over those of drawing it"""

    sigma: float
    longest: int
    train: float
    shared: bool
    steps: int


@dataclass
class Group:
    """versions: tokens by version that drew them"""

    number: int
    lengths: list[int]
    opened: int = 0
    drawn: list[int] = field(default_factory=lambda: [0] * SAMPLES)
    versions: dict[int, int] = field(default_factory=dict)
    done_s: float = math.inf

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class Engine:
    """Draws samples in the order in which they were asked for, so many at a time; all that run get a token a step."""

    def __init__(self) -> None:
        self.now_s, self.clock, self.version = 0.0, 0.0, 0
        self._queue: list[tuple[Group, int, int]] = []
        self._running: list[tuple[float, int, int, Group, float]] = []

    def ask(self, group: Group, tokens: float) -> None:
        """Have the samples of a group drawn on, by so many tokens at most."""
        for place, (length, drawn) in enumerate(zip(group.lengths, group.drawn, strict=True)):
            if drawn < length:
                self._queue.append((group, place, int(min(length, drawn + tokens))))

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._running)

    def run(self, until_s: float = math.inf) -> None:
        """On to the next end of a sample, or to a moment."""
        while self._queue and len(self._running) < PLACES:
            group, place, stop = self._queue.pop(0)
            end = self.clock + stop - group.drawn[place]
            heapq.heappush(self._running, (end, group.number, place, group, self.clock))
        if not self._running:
            self.now_s = until_s
            return
        step_s = 1 + PER_SAMPLE * len(self._running)
        end_s = self.now_s + (self._running[0][0] - self.clock) * step_s
        if end_s > until_s:
            self.clock, self.now_s = self.clock + (until_s - self.now_s) / step_s, until_s
            return
        self.clock, self.now_s = self._running[0][0], end_s
        while self._running and self._running[0][0] <= self.clock:
            end, _, place, group, begun = heapq.heappop(self._running)
            self._got(group, place, round(end - begun))
            if group.drawn == group.lengths:
                group.done_s = self.now_s

    def halt(self) -> None:
        """Give back all that is unfinished, with the whole tokens that it has."""
        for _, _, place, group, begun in self._running:
            self._got(group, place, min(int(self.clock - begun), group.lengths[place] - group.drawn[place] - 1))
        self._queue, self._running = [], []

    def _got(self, group: Group, place: int, tokens: int) -> None:
        group.drawn[place] += tokens
        group.versions[self.version] = group.versions.get(self.version, 0) + tokens


def drawn_groups(sizes: Sizes, seed: int) -> list[Group]:
    chance, half = random.Random(seed), math.sqrt(0.5) * sizes.sigma
    groups = []
    for number in range(GROUPS * sizes.steps):
        of_prompt = chance.gauss(0, half)
        logs = [of_prompt + chance.gauss(0, half) for _ in range(SAMPLES)]
        groups.append(Group(number, [max(1, min(sizes.longest, round(MEDIAN * math.exp(log)))) for log in logs]))
    return groups


def chosen(kind: Kind, waiting: Sequence[Group], step: int) -> list[Group] | None:
    """The groups that a step trains on, of those that are open; None: that is not known yet."""
    if kind.choice == "in order":
        return list(waiting[:GROUPS])
    forced = [group for group in waiting if group.opened <= step - kind.oldest]
    others = [group for group in waiting if group.opened > step - kind.oldest]
    done = sorted((group for group in others if group.done_s < math.inf), key=lambda group: group.done_s)
    if kind.choice == "done before":
        done.sort(key=lambda group: group.number)
        done += [group for group in others if group not in done]
    if len(forced) + len(done) < GROUPS:
        return None
    found, rest = list(forced), others
    for group in done:
        without = [other for other in rest if other is not group]
        if len(found) < GROUPS and in_time(kind, without, step, GROUPS - len(found) - 1):
            found, rest = [*found, group], without
    return found if len(found) == GROUPS else None


def in_time(kind: Kind, waiting: Sequence[Group], step: int, places: int) -> bool:
    """Whether each of these groups can be trained on before it is too old, if this step has so many places left."""
    last = Counter(group.opened + kind.oldest for group in waiting)
    due = 0
    for when in sorted(last):
        due += last[when]
        if due > places + GROUPS * (when - step):
            return False
    return True


def played(kind: Kind, sizes: Sizes, seed: int) -> list[float]:
    """The numbers of a run, in the order of COLUMNS."""
    groups = drawn_groups(sizes, seed)
    tokens = fmean(group.tokens for group in groups) * GROUPS
    draw_s = tokens / PLACES * (1 + PER_SAMPLE * PLACES)
    engine, waiting, begun = Engine(), list[Group](), list[float]()
    lags, ages, counts, of_batch = list[int](), list[float](), list[int](), list[int]()
    unopened = groups[::-1]
    for step in range(sizes.steps):
        begun.append(engine.now_s)
        engine.version = step
        while unopened and len(waiting) < (kind.ahead + 1) * GROUPS:
            waiting.append(group := unopened.pop())
            group.opened = step
        own = chosen(kind, waiting, step) if kind.choice != "done first" else None
        first = own or []
        for group in first + [group for group in waiting if group not in first]:
            engine.ask(group, math.inf if group in first else kind.tokens)
        while own is None or any(group.done_s == math.inf for group in own):
            engine.run()
            own = own if kind.choice != "done first" else chosen(kind, waiting, step)
        train_s = sizes.train * draw_s * sum(group.tokens for group in own) / tokens
        rest(engine, train_s, goes_on=kind.tokens < math.inf, shared=sizes.shared)
        for group in own:
            waiting.remove(group)
            lags.append(step - group.opened)
            ages += [step - version for version in group.versions]
            counts += group.versions.values()
        of_batch.append(sum(group.tokens for group in own))
    first, last = sizes.steps // 4, sizes.steps - kind.ahead - 2
    ideal_s = draw_s * (1 + sizes.train if sizes.shared else max(1, sizes.train))
    step_s = (begun[last] - begun[first]) / (last - first) / ideal_s
    of_tokens = sum(age * count for age, count in zip(ages, counts, strict=True)) / sum(counts)
    return [step_s, fmean(lags), max(lags), of_tokens, pstdev(of_batch) / fmean(of_batch)]


def rest(engine: Engine, train_s: float, *, goes_on: bool, shared: bool) -> None:
    """A step from where its samples are there to its end.

    Args:
        goes_on: whether it also waits until the samples of later batches have their tokens.
    """
    while goes_on and shared and engine.has_work:
        engine.run()
    end_s = engine.now_s + train_s
    if shared:
        engine.now_s = end_s
    while engine.now_s < end_s:
        engine.run(end_s)
    while goes_on and engine.has_work:
        engine.run()
    engine.halt()


def kinds(longest: int, *, shared: bool) -> list[Kind]:
    first, before = "done first", "done before"

    def tokens(n: int) -> int:
        return math.ceil(longest / (n + (1 if shared else 0.5)))

    return [
        Kind("wait 1", 1, 1, longest),
        *(Kind(f"keep {n}", n, n) for n in (1, 2, 3, 4)),
        *(Kind(f"tokens {n}", n, n, tokens(n)) for n in (1, 2, 3, 4)),
        *(Kind(f"{m} ahead, {n} old, first", m, n, choice=first) for m, n in ((1, 2), (1, 3), (2, 3))),
        *(Kind(f"{m} ahead, {n} old", m, n, choice=before) for m, n in ((2, 3), (3, 4))),
        *(Kind(f"{m} ahead, {n} old, tokens", m, n, tokens(n), before) for m, n in ((2, 3), (3, 4))),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    sizes = Sizes(options.sigma, options.longest, options.train, options.shared, 12 if options.tiny else options.steps)
    print(row("", COLUMNS))
    for kind in kinds(sizes.longest, shared=sizes.shared):
        runs = [played(kind, sizes, seed) for seed in range(options.repeats)]
        step_s, lag, _, of_tokens, unequal = (fmean(numbers) for numbers in zip(*runs, strict=True))
        most = max(numbers[2] for numbers in runs)
        print(row(kind.name, [f"{step_s:.2f}", f"{lag:.2f}", f"{most:.0f}", f"{of_tokens:.2f}", f"{unequal:.2f}"]))
        sys.stdout.flush()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of the logarithms of lengths")
    parser.add_argument("--longest", type=positive, default=3200, help="tokens at which responses are truncated")
    parser.add_argument("--train", type=float, default=0.5, help="seconds of training over those of drawing a batch")
    parser.add_argument("--shared", action="store_true", help="generation and training share devices")
    parser.add_argument("--steps", type=positive, default=64)
    parser.add_argument("--repeats", type=positive, default=3, help="seeds")
    parser.add_argument("--tiny", action="store_true", help="a few steps: does the benchmark itself work?")
    return parser


if __name__ == "__main__":
    sys.exit(main())
