"""Samples that instances give to others during a rollout: off, on, and spread evenly at every step.

    python benchmarks/sample_reallocation.py                        # simulated and on two workers, on two idle cores
    python benchmarks/sample_reallocation.py --parts simulated      # a minute
    python benchmarks/sample_reallocation.py --lengths RUN_DIR/samples/step-*.jsonl --parts simulated
    python benchmarks/sample_reallocation.py --parts real --skew 4 --prompts 8 --group 16    # long ones on one
    python benchmarks/sample_reallocation.py --tiny --repeats 1     # does the benchmark itself work?

Simulated: 4 to 32 instances, to which groups of samples are dealt as the leader deals them. Lengths are those of the
files given (an earlier step tells the run what to expect, the next one is generated), or drawn: a group's length is
log-normal, its samples' around it. What decides is the run's own (`runtime.rebalancing`), at a simulated clock; steps
take what the curve says, and a move holds up both sides for `--move-steps`.

    off      samples end where they begin
    on       `rebalance: auto`, with the curve fitted and the lengths seen in a rollout before
    even     at every step samples are spread evenly over the instances, and moves are free
    paid     samples are spread evenly at some moments, with moves as of `on`: every 1/4, 1/8 or 1/16 of the rollout,
             where an instance has 1, 3 or 5 more than its share, whichever of these nine was best for all rollouts

Real: SmolLM2-135M-Instruct (`--tiny`: a random model of two layers) on two workers of one thread, as in
`stage_fusion.py`, without scoring: each step is done `off` and `auto` (`on`), with the same responses, token for token.
Seconds are of generation; `even` is computed from the decode steps of `off`.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any, cast

from ending import ends_when_terminated
from placed.by_turns import Turn, turns_of
from placed.recipes import grpo
from placed.runs import RunFailed
from sides import positive, row
from stage_fusion import distributions
from step_curves import EPYC, H200, XEON, StepCurve, curve

from plait.engines import Traits
from plait.observe.run_log import read_rows
from plait.policy.decode_pace import line_through
from plait.policy.migration import AT_ONCE, Bounds, HowToMove
from plait.runtime.folder.decisions import Experience
from plait.runtime.steps.rebalancing import Balance, Rebalancer
from plait.schedule.timeline import Span, Timeline
from plait.workers.call_messages import TELL_STEPS

PROMPT = 128
"""Tokens of a prompt, simulated."""
Key = tuple[int, int]
Lengths = Mapping[int, Sequence[int]]
"""Prompt → the lengths of its samples."""


class Instances:
    """Simulated instances: what a `Balance` asks of an engine and of its moves, and the steps that they take."""

    def __init__(self, lengths: Lengths, count: int, step_s: Callable[[int], float], slots: int, move_s: float) -> None:
        self.traits = Traits(num_instances=count, keeps_weights=False, shares_devices=False)
        self.moves = self
        self.step_s, self.slots, self.move_s = step_s, slots, move_s
        self.left: list[dict[Key, int]] = [{} for _ in range(count)]
        for number, (uid, group) in enumerate(lengths.items()):  # equal groups are dealt by turns
            self.left[number % count] |= {(uid, index): length for index, length in enumerate(group)}
        self.now = 0.0
        self.lengths = {key: length for row in self.left for key, length in row.items()}
        self.said: dict[Key, int] = {}
        """As of the last step of its instance that ended a sample, or was the last of TELL_STEPS without one."""
        self._quiet = [0] * count
        self.spans: list[Span] = []
        self.moved_s: float | None = None
        self._moves: dict[int, list[tuple[int, Key]]] = {}
        self._asked_at = 0.0
        self._held_up = [0.0] * count
        self._due: list[tuple[float, int]] = []

    @property
    def running(self) -> tuple[int, ...]:
        return tuple(map(len, self.left))

    @property
    def unfinished(self) -> tuple[tuple[Key, ...], ...]:
        return tuple(tuple(row) for row in self.left)

    @property
    def is_moving(self) -> bool:
        return bool(self._moves)

    def move(self, pairs: Mapping[tuple[int, int], Sequence[Key]], how: HowToMove = AT_ONCE) -> int:
        """They move as their instance has ended its step, at once."""
        self._asked_at, self.moved_s = self.now, None
        for (source, target), keys in pairs.items():
            self._moves.setdefault(source, []).extend((target, key) for key in keys)
        return sum(map(len, pairs.values()))

    def run(self, balance: Balance | Levelling | None) -> float:
        """Seconds until the last sample ends."""
        for place in range(self.traits.num_instances):
            self._begin(place)
        ended = 0.0
        while self._due:
            self.now, place = heapq.heappop(self._due)
            running = list(self.left[place])[: self.slots]
            for key in running:
                self.left[place][key] -= 1
                if self.left[place][key] <= 0:
                    del self.left[place][key]
                    ended = self.now
            self._tell(place, running)
            self._give(place)
            if balance is not None and any(self.running):
                balance.look(frees=False)
            self._begin(place)
        if balance is not None:
            balance.end()
        return ended

    def _begin(self, place: int) -> None:
        count = min(len(self.left[place]), self.slots)
        if count and not any(other == place for _, other in self._due):
            took, self._held_up[place] = self.step_s(count) + self._held_up[place], 0.0
            heapq.heappush(self._due, (self.now + took, place))
            self.spans.append(
                Span("generate", "DECODE", place, 0.0, self.step_s(count), 0, count, samples=count, drawn=count)
            )

    def _tell(self, place: int, running: Sequence[Key]) -> None:
        """What samples have said, as instances of a run tell it."""
        left = self.left[place]
        self._quiet[place] += 1
        if self._quiet[place] == TELL_STEPS or any(key not in left for key in running):
            self._quiet[place] = 0
            self.said |= {key: self.lengths[key] - left[key] for key in running if key in left}

    def _give(self, source: int) -> None:
        pause_s = self.move_s
        for target, key in self._moves.pop(source, []):
            if key in self.left[source]:
                self.left[target][key] = self.left[source].pop(key)
                self._held_up[source] = self._held_up[target] = pause_s
                self._begin(target)
        if not self._moves and self.moved_s is None:
            self.moved_s = max(pause_s, self.now - self._asked_at)


class Levelling:
    """In place of a `Balance`: counts are levelled at times that are given; lengths do not matter.

    Args:
        times_s: when.
        most: samples that an instance may have more than its share.
    """

    def __init__(self, instances: Instances, times_s: Sequence[float], most: int) -> None:
        self._instances, self._times_s, self._most = instances, deque(times_s), most

    def look(self, *, frees: bool) -> None:
        if self._instances.is_moving or not self._times_s or self._instances.now < self._times_s[0]:
            return
        self._times_s.popleft()
        unfinished = self._instances.unfinished
        share, others = divmod(sum(map(len, unfinished)), len(unfinished))
        fullest = sorted(range(len(unfinished)), key=lambda place: -len(unfinished[place]))
        wanted = {place: share + (number < others) for number, place in enumerate(fullest)}
        if len(unfinished[fullest[0]]) - max(wanted.values()) < self._most:
            return
        takers = [place for place in fullest for _ in range(wanted[place] - len(unfinished[place]))]
        pairs: dict[tuple[int, int], list[Key]] = {}
        for place in fullest:
            for key in unfinished[place][: max(0, len(unfinished[place]) - wanted[place])]:
                pairs.setdefault((place, takers.pop()), []).append(key)
        if pairs:
            self._instances.move(pairs)

    def end(self) -> None:
        pass


def paid_s(rollouts: Sequence[Lengths], even: Sequence[float], of: Callable[[Lengths], Instances]) -> list[float]:
    """Seconds of each rollout where counts are levelled by the schedule that is best for all of them.

    Args:
        even: seconds of each, about.
        of: instances that begin with these samples.
    """
    found = []
    for parts, most in product((4, 8, 16), (1, 3, 5)):
        seconds = []
        for lengths, about_s in zip(rollouts, even, strict=True):
            engine = of(lengths)
            seconds.append(engine.run(Levelling(engine, [about_s * (k + 1) / parts for k in range(parts)], most)))
        found.append(seconds)
    return min(found, key=sum)


def even_s(lengths: Lengths, count: int, step_s: Callable[[int], float], slots: int) -> float:
    """Seconds where every step has its unfinished samples spread evenly; those beyond all slots wait for one."""
    left = sorted((length for group in lengths.values() for length in group), reverse=True)
    begun = [left.pop() for _ in range(min(len(left), count * slots))]
    seconds = 0.0
    while begun:
        steps = min(begun)
        seconds += steps * step_s(-(-len(begun) // count))
        begun = [length - steps for length in begun if length > steps]
        begun += [left.pop() for _ in range(min(len(left), count * slots - len(begun)))]
    return seconds


def drawn(prompts: int, samples: int, seed: int, limit: int) -> Lengths:
    """Groups of correlated lengths, cut at a limit."""
    draw = random.Random(seed)
    lengths = {}
    for uid in range(prompts):
        middle = draw.lognormvariate(0.0, 0.7) * limit / 4
        lengths[uid] = [max(1, min(limit, round(middle * draw.lognormvariate(0.0, 0.5)))) for _ in range(samples)]
    return lengths


def recorded(file: Path) -> Lengths:
    """Lengths in a file of a run's samples."""
    lengths: dict[int, list[int]] = {}
    uids: dict[str, int] = {}
    for answer in read_rows(file):
        lengths.setdefault(uids.setdefault(str(answer["uid"]), len(uids)), []).append(len(answer["token_ids"]))
    return lengths


def simulated(
    before: Lengths, lengths: Lengths, count: int, step_of: StepCurve, slots: int, move_steps: float
) -> tuple[float, float, float, int]:
    """Seconds off, on and even, and how many samples moved.

    Args:
        move_steps: seconds of a move, in steps of one sample.
    """
    step_s = cache(lambda running: float(step_of(running)))
    move_s = move_steps * step_s(1)
    first, plain, engine = (Instances(one, count, step_s, slots, move_s) for one in (before, lengths, lengths))
    first.run(None)
    off = plain.run(None)
    with tempfile.TemporaryDirectory() as name:
        known = Experience(Path(name) / "decisions.jsonl", clock=lambda: engine.now)
        known.keep((0, "generate"), {"moves": [], "curve": None, "move_s": move_s}, move_s)
        rebalancer = Rebalancer(known)
        rebalancer.learn(Timeline(tuple(first.spans)), [length for group in before.values() for length in group])
        longest = max(length for group in (*before.values(), *lengths.values()) for length in group)
        bounds = Bounds(slots, longest, float("inf"))
        balance = rebalancer.balance((1, "generate"), cast(Any, engine), dict.fromkeys(lengths, PROMPT), bounds)
        assert balance is not None, "these instances move samples"
        on = engine.run(balance)
    return off, on, even_s(lengths, count, step_s, slots), balance.num_moved


def simulate(options: argparse.Namespace) -> None:
    names = ["off", "on", "even", "paid", "speed", "of even", "of paid", "moved"]
    print(row("simulated", names, "medians of rollouts, shares of gains of their sums"))
    for step_of in options.curve:
        for count in options.instances:
            rollouts = _rollouts(count, options)
            rows = [
                simulated(first, second, count, step_of, options.slots, options.move_steps)
                for first, second in rollouts
            ]
            offs, ons, evens, moved = zip(*rows, strict=True)
            step_s = cache(lambda running, of=step_of: float(of(running)))
            move_s = options.move_steps * step_s(1)
            begun = partial(Instances, count=count, step_s=step_s, slots=options.slots, move_s=move_s)
            paid = paid_s([second for _, second in rollouts], evens, begun)
            values = [f"{median(column):.2f}" for column in (offs, ons, evens, paid)]
            values += [f"{median(offs) / median(ons):.3f}", _share(offs, ons, evens), _share(offs, ons, paid)]
            slowest = min(off / on for off, on in zip(offs, ons, strict=True))
            name = f"{step_of.name}, {count}"
            print(row(name, [*values, f"{median(moved):.0f}"], f"slowest {slowest:.3f}"), flush=True)


def _share(off: Sequence[float], on: Sequence[float], best: Sequence[float]) -> str:
    """Of the gain of what is best."""
    most = sum(off) - sum(best)
    return f"{(sum(off) - sum(on)) / most:.0%}" if most > 0 else ""


def _rollouts(count: int, options: argparse.Namespace) -> list[tuple[Lengths, Lengths]]:
    if options.lengths:
        steps = [recorded(Path(file)) for file in options.lengths]
        return list(pairwise(steps))
    groups = max(1, count * options.per_instance // options.group)
    steps = [drawn(groups, options.group, seed, options.limit) for seed in range(options.repeats + 1)]
    return list(pairwise(steps))


def measure(options: argparse.Namespace, folder: Path) -> None:
    """On two workers."""
    recipe = base_recipe(folder, options)
    names = ["off", "on", "speed", "even", "of gain", "moved"]
    print(row("two workers", names, "seconds of generation, medians of steps"))
    for number, lengths in enumerate(distributions(options)):
        skewed = replace(lengths, odd=options.skew)
        steps = turns_of(recipe, folder / f"{number}", ("off", "auto"), skewed, steps=options.steps)
        rows = []
        for step in steps:
            off, on = (step[way].seconds("generate") for way in ("off", "auto"))
            rows.append((off, on, even_of(step["off"]), step["auto"].moved))
        off, on, even, moved = (median(column) for column in zip(*rows, strict=True))
        speeds = median(row[0] / row[1] for row in rows)
        gained, most = (sum(row[0] - row[place] for row in rows) for place in (1, 2))
        values = [
            f"{off:.3f}",
            f"{on:.3f}",
            f"{speeds:.3f}",
            f"{even:.3f}",
            f"{gained / most:.0%}" if most > 0 else "",
            f"{moved:.0f}",
        ]
        print(row(f"lengths {number + 1}", values), flush=True)
        if any(step["off"].responses != step["auto"].responses for step in steps):
            print("  (responses differ between ways)")


def even_of(turn: Turn) -> float:
    """Seconds of generation, had samples been spread evenly at every step by moves that are free: what was no decode
    step takes what it took."""
    steps = [span for span in turn.of("generate") if span.kind == "DECODE" and span.drawn]
    if not steps:
        return turn.seconds("generate")
    fixed_s, each_s = line_through(turn.decode_steps)
    by_rank: dict[int, list[Span]] = {}
    for span in steps:
        by_rank.setdefault(span.rank, []).append(span)
    behind = max(by_rank, key=lambda rank: max(span.end_s for span in by_rank[rank]))
    other = turn.seconds("generate") - sum(span.duration_s for span in by_rank[behind])
    lengths = {0: [len(response) for response in turn.responses]}
    return other + even_s(lengths, len(by_rank), lambda running: fixed_s + each_s * running, len(lengths[0]))


def base_recipe(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    recipe = grpo(folder, is_tiny=options.tiny, prompts=options.prompts, samples=options.group, steps=1)
    calls = {"actor.generate": "decode", "actor.train": "train"}
    placements = [{"call": call, "mode": mode, "ranks": [0, 1], "dp": 2} for call, mode in calls.items()]
    plan = folder / "plan.json"
    record = {"format": "plait-plan", "version": 1, "name": "two", "num_ranks": 2, "placements": placements}
    plan.write_text(json.dumps(record))
    flow = Path(__file__).parent / "placed" / "generation_flow.py"
    return recipe | {
        "plan": str(plan),
        "fusion": "off",
        "rebalance": "auto",
        "algorithm": f"{flow}:generated",
        "options": {},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.tiny:
        options.tokens, options.distributions = min(options.tokens, 64), 1
    if "simulated" in options.parts:
        simulate(options)
    if "real" in options.parts:
        with ends_when_terminated(), tempfile.TemporaryDirectory(prefix="plait-reallocation-") as name:
            try:
                measure(options, Path(name))
            except RunFailed as error:
                print(error, file=sys.stderr)
                return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers")
    parser.add_argument("--parts", nargs="*", choices=("simulated", "real"), default=["simulated", "real"])
    parser.add_argument("--repeats", type=positive, default=5, help="rollouts simulated, runs of each kind")
    parser.add_argument(
        "--curve",
        type=curve,
        nargs="+",
        default=[EPYC, XEON, H200],
        help="NAME=SAMPLES:MS,SAMPLES:MS…: what steps take",
    )
    parser.add_argument("--instances", type=positive, nargs="*", default=[4, 8, 16, 32])
    parser.add_argument("--lengths", nargs="*", default=[], help="files of a run's samples, in the order of its steps")
    parser.add_argument("--per-instance", type=positive, default=32, help="samples, simulated")
    parser.add_argument("--group", type=positive, default=8, help="samples of a prompt")
    parser.add_argument("--limit", type=positive, default=512, help="tokens of a response, simulated")
    parser.add_argument("--slots", type=positive, default=64, help="samples that an instance runs at once, simulated")
    parser.add_argument("--move-steps", type=float, default=2.0, help="that a move holds up both sides, simulated")
    parser.add_argument("--steps", type=positive, default=3, help="of each real run, behind its first")
    parser.add_argument("--prompts", type=positive, default=8, help="of a real step")
    parser.add_argument("--tokens", type=positive, default=256, help="limit of a real response")
    parser.add_argument("--distributions", type=positive, default=4, help="of real lengths")
    help_ = "real responses of every second prompt are so many times as long: one worker has them all"
    parser.add_argument("--skew", type=float, default=1.0, help=help_)
    return parser


if __name__ == "__main__":
    sys.exit(main())
