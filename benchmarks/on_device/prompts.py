"""Prompts that are computed beside samples that decode: by a graph, against the same steps launched by the host.

A rollout of four times as many samples as run at a time, of many lengths: as soon as one has ended the next one
begins, and every eighth brings a prompt. Two engines draw the same samples, by turns, behind a rollout in which all
sizes are captured; the exit code is 1 where log-probs of the same tokens are far apart.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from on_device.alike import alike
from on_device.job import Job, random_ids
from plait.data.records import Prompt, Sample
from plait.generation import prompt_captures
from plait.generation.engine import Engine
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.models.language_loading import load_model
from plait.models.language_model import LanguageModel

REPEATS = 1
WAYS = {True: "replayed", False: "launched"}
PER_PROMPT, TIMES = 8, 4
"""Samples of a prompt; how many times as many samples there are as run at a time."""


@dataclass(eq=False)
class Taken:
    """Seconds of a rollout, and of each of its steps that has a prompt beside samples, and that has none."""

    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    with_prompts: list[float] = field(default_factory=list)
    without: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = {"with prompts": self.with_prompts, "without": self.without}
        means = (
            f"{len(some)} steps {of} of {sum(some) / max(1, len(some)) * 1e3:.2f} ms" for of, some in kinds.items()
        )
        return f"{self.seconds:.3f} s ({', '.join(means)})"


def main() -> int:
    job = Job.read()
    are_far = [measure(job, shape) for shape in job.shapes]
    return int(any(are_far))


def measure(job: Job, shape: str) -> bool:
    """Whether the two ways are far apart."""
    model, is_far = load_model(job.model(shape), dtype=job.dtype, device=job.device), False
    for running in (8,) if job.is_tiny else (256, 64):
        engines = {in_graphs: engine_of(job, model, running) for in_graphs in WAYS}
        taken: dict[bool, list[Taken]] = {in_graphs: [] for in_graphs in WAYS}
        for number in range(1 + REPEATS):
            for in_graphs, way in WAYS.items():
                with captured_from(0 if in_graphs else sys.maxsize):
                    now = once(job, engines[in_graphs], running)
                if number:  # the first one compiles and captures
                    taken[in_graphs].append(now)
                    job.record("prompts", shape, running=running, way=way, round=number, seconds=now.seconds)
        replayed, launched = (median(one.seconds for one in taken[in_graphs]) for in_graphs in WAYS)
        print(f"{shape}, {running} at a time: replayed {taken[True][-1]}, launched {taken[False][-1]}")
        print(f"{shape}, {running} at a time: launched take {launched / replayed:.2f} times as long")
        both = alike(taken[True][-1].samples, taken[False][-1].samples)
        print(f"{shape}: {both}")
        captured = engines[True].state.forward.module.captured
        refusals = {} if captured is None else captured.refusals
        graphs = 0 if captured is None else sum(not size.has_head for size in captured.steps)
        found = {"replayed_s": replayed, "launched_s": launched, "graphs": graphs, "refusals": refusals}
        job.record("prompts", shape, running=running, **found, **both._asdict())
        is_far = is_far or both.is_far(job.dtype)
        del engines
    return is_far


def engine_of(job: Job, model: LanguageModel, running: int) -> Engine:
    prompt_tokens, most = sizes(job)
    room = running * (prompt_tokens + most + 32)
    return Engine(model, SamplingSettings(max_running=running, kv_tokens=room, speculation="off"))


def sizes(job: Job) -> tuple[int, int]:
    """Tokens of a prompt, and of the longest response."""
    return (24, 12) if job.is_tiny else (150, 192)


def once(job: Job, engine: Engine, running: int) -> Taken:
    """A rollout."""
    prompt_tokens, most = sizes(job)
    vocabulary, taken = engine.model.config.get_text_config().vocab_size, Taken()
    for uid in range(TIMES * running // PER_PROMPT):
        draw = random.Random(uid)
        lengths = tuple(draw.randint(most // 8, most) for _ in range(PER_PROMPT))
        prompt = Prompt(uid, "", random_ids(prompt_tokens + uid % 7, vocabulary, uid))
        sampling = Sampling(max_tokens=most, stop_token_ids=())
        engine.add(Request(prompt, PER_PROMPT, sampling, NoiseKey(0, 0), lengths=lengths))
    began = last = time.perf_counter()
    while engine.has_work:
        taken.samples += engine.step()
        last, before = time.perf_counter(), last
        if (record := engine.last_step) is not None and record.num_tokens:
            (taken.with_prompts if record.num_prefill_tokens else taken.without).append(last - before)
    taken.seconds = last - began
    return taken


@contextmanager
def captured_from(steps: int) -> Iterator[None]:
    """Within it a size with prompts is captured behind so many steps."""
    before, prompt_captures.BEFORE = prompt_captures.BEFORE, steps
    try:
        yield
    finally:
        prompt_captures.BEFORE = before


if __name__ == "__main__":
    sys.exit(main())
