"""Turns whose keys and values stay from round to round, against turns that are computed again.

As `benchmarks/turns.py`: one engine draws the same samples in the same turns both ways, by turns. Pool and graphs stay
in both; the exit code is 1 where log-probs of the same tokens are far apart.
"""

from __future__ import annotations

import sys
from statistics import median

from turns import Taken, Talk, once

from on_device.alike import alike
from on_device.job import SHAPES, Job, random_ids
from plait.data.records import Prompt
from plait.generation.engine import Engine
from plait.generation.settings import SamplingSettings
from plait.models.language_loading import load_model

REPEATS = 3
WAYS = {True: "found", False: "computed again"}


def main() -> int:
    job = Job.read()
    are_far = [measure(job, shape) for shape in job.shapes]
    return int(any(are_far))


def measure(job: Job, shape: str) -> bool:
    """Whether the two ways are far apart."""
    groups, samples, prompt_tokens, turns, tokens = (2, 2, 20, 3, 16) if job.is_tiny else (8, 8, 480, 4, 32)
    prompts = [Prompt(uid, "", random_ids(prompt_tokens, SHAPES[shape].vocabulary, uid)) for uid in range(groups)]
    talk = Talk(prompts, samples, turns, tokens, tokens)
    model = load_model(job.model(shape), dtype=job.dtype, device=job.device)
    running = groups * samples
    room = running * (prompt_tokens + 2 * turns * tokens + 32)
    engine = Engine(model, SamplingSettings(max_running=running, kv_tokens=room, speculation="off"))
    taken: dict[bool, list[Taken]] = {in_turns: [] for in_turns in WAYS}
    for number in range(1 + REPEATS):
        for in_turns, way in WAYS.items():
            now = once(engine, talk, in_turns=in_turns)
            if number:  # the first one compiles and captures
                taken[in_turns].append(now)
                job.record("turns", shape, way=way, round=number, tokens=now.tokens, seconds=now.seconds)
    found, again = (median(one.seconds for one in taken[in_turns]) for in_turns in WAYS)
    print(
        f"{shape}, {running} samples of {turns} turns: computed {taken[True][0].tokens} tokens in {found:.3f} s where "
        f"turns are found, {taken[False][0].tokens} in {again:.3f} s where they are computed again: "
        f"{again / found:.2f} times as long"
    )
    both = alike(taken[True][-1].samples, taken[False][-1].samples)
    print(f"{shape}: {both}")
    captured = engine.state.forward.module.captured
    refusals = {} if captured is None else captured.refusals
    job.record("turns", shape, found_s=found, again_s=again, **both._asdict(), refusals=refusals)
    return both.is_far(job.dtype)


if __name__ == "__main__":
    sys.exit(main())
