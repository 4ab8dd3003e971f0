"""What looking for drafts takes of a step: CPU microseconds, warm and with the caches emptied before it.

Samples of one prompt say tokens of a small Markov chain, so that some draft tokens are accepted and most are not;
`adaptive` is told that steps take what they take of SmolLM2-135M on one core, at a clock of its own. Timed is all that
an engine without drafts does not do: to hear what was said, to look drafts up, to choose, to account for the step (CPU
seconds of the thread). A step streams all weights through the caches; so here an array of `--flush` MB is read before
every step.

    python benchmarks/draft_looking.py               # a minute
    python benchmarks/draft_looking.py --steps 50    # does the benchmark itself work?
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np
from step_curves import EPYC

from plait.speculation.drafter import Asked, PoolDrafter
from plait.speculation.speculation import Speculation

PROMPT = tuple(range(40))
CONTEXT = 100
"""Tokens of a sample."""
VOCABULARY = 50


def looked(running: int, steps: int, flush_mb: int, share: float) -> tuple[float, float]:
    """Median microseconds of a step in which drafts are looked for, and the share of those steps.

    Args:
        share: of tokens that follow from the one before; the others are drawn at random.
    """
    clock_s = 0.0
    speculation = Speculation("adaptive", PoolDrafter(64 << 20), lambda: clock_s)
    rng, array = np.random.default_rng(0), np.ones(flush_mb << 17)
    slots, last = np.arange(running), np.zeros(running, np.int64)
    for slot in range(running):
        speculation.begin(slot, PROMPT)
    said, counts, taken, num_due = last, np.ones(running, np.int64), [], 0
    for number in range(steps):
        if array.size:
            array.sum()
        began = time.thread_time()
        is_due, drafts = speculation.is_due(running, running * CONTEXT), [()] * running
        if is_due:
            speculation.hear(slots, counts, said, np.full(len(said), 0.7))
            places = np.full(running, number)
            asked = Asked(slots, slots.astype(np.uint64), places, slots < 0, np.full(running, 15), ())
            drafts = speculation.propose(asked, running * CONTEXT)
        looking_s = time.thread_time() - began
        said, counts = np.zeros(0, np.int64) if is_due else said, np.zeros(running, np.int64) if is_due else counts
        parts = np.split(said, counts.cumsum()[:-1])
        for slot in range(running):
            tokens = list(parts[slot])
            for draft in (*drafts[slot], None):
                last[slot] = (7 * last[slot] + 3) % VOCABULARY if rng.random() < share else rng.integers(VOCABULARY)
                tokens.append(int(last[slot]))
                if last[slot] != draft:
                    break
            parts[slot] = np.array(tokens, np.int64)
        drawn = sum(map(len, parts)) - len(said)
        said, counts = np.concatenate(parts), np.array([len(part) for part in parts])
        num_drafted = sum(map(len, drafts))
        step_s = float(EPYC(running + num_drafted))
        clock_s += step_s
        began = time.thread_time()
        speculation.done(running, num_drafted, running * CONTEXT, drawn, step_s)
        if is_due:
            num_due += 1
            taken.append(looking_s + time.thread_time() - began)
    return 1e6 * median(taken[len(taken) // 4 :]), num_due / steps


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--flush", type=int, default=256, help="MB that are read before each step")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.8], help="of tokens that are known")
    options = parser.parse_args()
    print("| known | running | warm, µs | cold, µs | steps in which drafts were looked for |")
    print("| --- | --- | --- | --- | --- |")
    for share in options.shares:
        for running in options.running:
            (warm, _), (cold, often) = (looked(running, options.steps, mb, share) for mb in (0, options.flush))
            print(f"| {share:.0%} | {running} | {warm:.0f} | {cold:.0f} | {often:.0%} |", flush=True)


if __name__ == "__main__":
    main()
