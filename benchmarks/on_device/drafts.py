"""What drafts of a draft model cost and gain, against steps without drafts, over the same weights and prompts.

Each way has an engine of its own. Drafts of DRAFTED tokens are made for all samples in all steps:

    off         no drafts: steps are launched ahead
    a smaller   by a model with random weights of its own, so that few are accepted: what drafts cost
    itself      by the policy, so that all are accepted but where kernels round by the number of rows: the best case
    adaptive    as many as pay, by the smaller one

Of each are said: seconds of a step, how many of them go to drafts (drafting) and how many to the rest (verifying),
tokens, and what a forward of the draft model takes by the device's own clock; how often a step waits for the device;
which steps were captured; and whether the samples are those of plain steps. At last, in float32, they must be to the
token. The exit code is 1 where they are not, or log-probs of the same tokens are far apart.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Literal, NamedTuple

import torch

from on_device.alike import alike
from on_device.decode import add
from on_device.job import Job
from plait.data.records import Sample
from plait.generation.draft_steps import DraftSteps
from plait.generation.engine import Engine
from plait.generation.forward import Forward
from plait.generation.model_drafter import ModelDrafter
from plait.generation.settings import SamplingSettings
from plait.generation.speculator import Speculator
from plait.models.language_loading import load_model
from plait.models.language_model import LanguageModel
from plait.speculation.counts import Counts

DRAFTED = 3
"""Tokens of a draft: with it 64 samples have 256 rows, the most that are captured."""
SMALLER = {"1.5B": "0.5B", "tiny": "tinier"}
"""Shape of a policy → of its draft model, which has all of its tokens: for a sample with others it does not draft."""
EXACTLY_S = 40.0
"""Left at least for the comparison in float32: layers are compiled once more."""


@dataclass(frozen=True)
class Way:
    """How drafts are made."""

    name: str
    speculation: Literal["off", "adaptive"] | int
    draft: str | None
    """The shape of the draft model."""


class Step(NamedTuple):
    seconds: float
    drafting_s: float
    drawn: int
    """Tokens that samples got."""


class Rollout(NamedTuple):
    steps: list[Step]
    """Those that computed all samples and nothing else."""
    samples: list[Sample]
    counts: Counts
    """What its drafts came to."""


def main() -> int:
    job = Job.read()
    are_far = [measure(job, shape) for shape in job.shapes]
    return int(any(are_far))


def measure(job: Job, shape: str) -> bool:
    """Whether a way is far from plain steps."""
    smaller, is_far = SMALLER.get(shape, shape), False
    ways = [
        Way("off", "off", None),
        Way(f"{DRAFTED} by {smaller}", DRAFTED, smaller),
        Way(f"{DRAFTED} by itself", DRAFTED, shape),
        Way(f"adaptive by {smaller}", "adaptive", smaller),
    ]
    sizes, lengths = ((1, 2), (8, 24)) if job.is_tiny else ((1, 64), (480, 96))
    model = load_model(job.model(shape), dtype=job.dtype, device=job.device)
    plain: dict[int, Rollout] = {}
    for way in ways:
        engine = engine_of(job, model, way, max(sizes), sum(lengths))
        for samples in sizes:
            for number in range(2):  # the first one compiles and captures
                found = rollout(engine, samples, lengths, number)
            expected = plain.setdefault(samples, found)
            say(job, shape, way, engine, found, expected)
            both = alike(found.samples, expected.samples)
            is_far |= both.is_far(job.dtype)
            if found is not expected:
                print(f"{'':>20} {both}", flush=True)
            job.record("drafts", shape, way=way.name, samples=samples, **both._asdict())
        waits(job, shape, way, engine, max(sizes), lengths)
        captures(job, shape, way, engine)
        del engine  # with its pool and its draft model
    del model
    return exactly(job, smaller) or is_far


def engine_of(job: Job, model: LanguageModel, way: Way, samples: int, tokens: int) -> Engine:
    """With room for so many samples of so many tokens."""
    draft = None if way.draft is None else job.model(way.draft)
    room = samples * (tokens + 32)
    settings = SamplingSettings(
        max_running=samples, kv_tokens=room, speculation=way.speculation, draft_model=draft
    )  # fmt: skip
    return Engine(model, settings)


def rollout(engine: Engine, samples: int, lengths: tuple[int, int], number: int) -> Rollout:
    """A sample of each of so many prompts.

    Args:
        lengths: tokens of a prompt, and of a response.
        number: others have other prompts.
    """
    steps, said = list[Step](), list[Sample]()
    first = counted(engine)
    add(engine, samples, *lengths, number)
    while engine.has_work:
        drafted_s, began = counted(engine).drafting_s, time.perf_counter()
        said += engine.step()
        seconds, record = time.perf_counter() - began, engine.last_step
        if record is not None and record.num_sequences == samples and not record.num_prefill_tokens:
            steps.append(Step(seconds, counted(engine).drafting_s - drafted_s, record.num_drawn))
    return Rollout(steps, said, counted(engine).since(first))


def counted(engine: Engine) -> Counts:
    """A copy, which stays."""
    return Counts() if engine.speculation is None else engine.speculation + Counts()


def say(job: Job, shape: str, way: Way, engine: Engine, found: Rollout, plain: Rollout) -> None:
    """Seconds and tokens of a step."""
    samples, counts = len(found.samples), found.counts
    step_s, drafting_s = (median(getattr(one, name) for one in found.steps) for name in ("seconds", "drafting_s"))
    tokens_per_s, plain_per_s = (
        mean(step.drawn for step in one.steps) / median(step.seconds for step in one.steps) for one in (found, plain)
    )
    steps, forward_s = drafter_of(engine), None
    if steps is not None:
        context = sum(len(one.prompt.token_ids) + len(one.token_ids) for one in found.samples)
        forward_s = steps.seconds.of_step(samples, context)
    rate = counts.accepted / counts.drafted if counts.drafted else None
    print(
        f"{shape}, {way.name:<14} {samples:>3} samples: a step {step_s * 1e3:.3f} ms, drafting {drafting_s * 1e3:.3f}, "
        f"verifying {(step_s - drafting_s) * 1e3:.3f}; {tokens_per_s:.0f} tokens/s, {tokens_per_s / plain_per_s:.2f} "
        "of off"
    )
    if steps is not None:
        share = "no draft" if rate is None else f"{rate:.0%} of {counts.drafted:.0f} draft tokens were accepted"
        print(f"{'':>20} {share}; a forward of the draft model {1e3 * (forward_s or 0):.3f} ms by the device")
    what = {"step_s": step_s, "drafting_s": drafting_s, "forward_s": forward_s, "tokens_per_s": tokens_per_s}
    what |= {"drafted": counts.drafted, "accepted": counts.accepted, "model_passes": counts.model_passes}
    job.record("drafts", shape, way=way.name, samples=samples, steps=len(found.steps), **what)


def waits(job: Job, shape: str, way: Way, engine: Engine, samples: int, lengths: tuple[int, int]) -> None:
    """How often a step waits for the device; of a CPU never."""
    add(engine, samples, *lengths, 2)
    while len(engine.said) < samples:
        engine.step()
    engine.step()
    steps = lengths[1] // (4 * (1 + DRAFTED))
    with counted_waits(job.device) as found:
        for _ in range(steps):
            engine.step()
    engine.halt(parks=False)
    by_kind = {kind: count / steps for kind, count in vars(found).items()}
    print(
        f"{shape}, {way.name}: {samples} samples: a step asks for {by_kind['asked']:.1f} events, waits for "
        f"{by_kind['waited']:.1f}, and {by_kind['others']:.1f} times otherwise"
    )
    job.record("drafts", shape, way=way.name, samples=samples, waits=by_kind)


@dataclass
class Waits:
    """How often the host has asked for an event of the device; how often it was not there yet; and how often an
    operation of torch has waited."""

    asked: int = 0
    waited: int = 0
    others: int = 0


@contextmanager
def counted_waits(device: str) -> Iterator[Waits]:
    """Counts within it. (A profiler sees more, and slows down all that is launched behind it.)"""
    found, own = Waits(), torch.cuda.Event.synchronize

    def synchronize(self: torch.cuda.Event) -> None:
        found.asked += 1
        found.waited += not self.query()
        own(self)

    torch.cuda.Event.synchronize = synchronize
    mode = torch.cuda.get_sync_debug_mode() if device == "cuda" else None
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if mode is not None:
                torch.cuda.set_sync_debug_mode("warn")
            yield found
            found.others = sum("synchronizing CUDA operation" in str(one.message) for one in said)
    finally:
        torch.cuda.Event.synchronize = own
        if mode is not None:
            torch.cuda.set_sync_debug_mode(mode)


def captures(job: Job, shape: str, way: Way, engine: Engine) -> None:
    """Which steps are replayed, of the policy and of the draft model, and what was refused."""
    forwards = {"policy": engine.state.forward}
    if (drafts := drafter_of(engine)) is not None:
        assert isinstance(drafts.forward, Forward)
        forwards["draft model"] = drafts.forward
    for whose, forward in forwards.items():
        if (captured := forward.module.captured) is None:
            continue
        sizes = sorted({f"{size.samples}x{size.width}" for size in captured.steps})
        print(f"{shape}, {way.name}: {whose}: captured {', '.join(sizes) or 'nothing'} in {captured.seconds:.1f} s")
        refused = captured.refusals
        for what, why in refused.items():
            print(f"{shape}, {way.name}: {whose}: steps {what}: {why}")
        job.record("drafts", shape, way=way.name, whose=whose, sizes=sizes, refusals=refused, seconds=captured.seconds)


def drafter_of(engine: Engine) -> DraftSteps | None:
    """What the draft model of an engine computes."""
    if not isinstance(engine.speculates, Speculator) or (costly := engine.speculates.speculation.costly) is None:
        return None
    assert isinstance(costly.drafter, ModelDrafter)
    return costly.drafter.steps


def exactly(job: Job, shape: str) -> bool:
    """Whether drafts change a token in float32, where no two tokens tie by what kernels round."""
    if time.time() > job.ends - EXACTLY_S:
        print(f"{shape} in float32: left out, time is up", flush=True)
        return False
    exact, lengths, samples = replace(job, dtype="float32"), (20, 24), 2 if job.is_tiny else 8
    model = load_model(job.model(shape), dtype=exact.dtype, device=job.device)
    found = [
        rollout(engine_of(exact, model, way, samples, sum(lengths)), samples, lengths, 0)
        for way in (Way("off", "off", None), Way("by itself", DRAFTED, shape))
    ]
    both, counts = alike(*(one.samples for one in found)), found[1].counts
    print(f"{shape} in float32: {both}; {counts.accepted:.0f} of {counts.drafted:.0f} draft tokens were accepted")
    job.record("drafts", shape, way="float32", **both._asdict(), accepted=counts.accepted, drafted=counts.drafted)
    return both.same < both.total or both.is_far(exact.dtype)


if __name__ == "__main__":
    sys.exit(main())
