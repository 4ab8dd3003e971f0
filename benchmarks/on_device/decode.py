"""Seconds of a decode step of B samples against the time in which the device reads weights, keys and values once."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from statistics import median

from on_device.job import Job, Rates, random_ids, rates_of, synchronize
from on_device.kernels import profiled, say_kernels
from plait.cost.estimate import model_shape
from plait.data.records import Prompt
from plait.generation.engine import Engine
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.models.language_loading import load_model
from plait.models.shape import ModelShape
from plait.training.memory import BYTES

GOAL = 0.7
PROFILED, MOST_PROFILED = (1, 64), 8
"""Samples of steps whose kernels are told apart; steps at most."""


def main() -> int:
    job = Job.read()
    rates = rates_of(job)
    print(rates)
    job.record("decode", "", **asdict(rates))
    for shape in job.shapes:
        measure(job, shape, rates)
    return 0


def measure(job: Job, shape: str, rates: Rates) -> None:
    sizes = (1, 2) if job.is_tiny else (1, 4, 16, 64, 256)
    prompt_tokens, tokens = (8, 6) if job.is_tiny else (480, 40)
    sizes_of_model = model_shape(job.model(shape))
    model = load_model(job.model(shape), dtype=job.dtype, device=job.device)
    room = max(sizes) * (prompt_tokens + tokens + 32)
    engine = Engine(model, SamplingSettings(max_running=max(sizes), kv_tokens=room))
    print(f"{shape}, contexts of {prompt_tokens} to {prompt_tokens + tokens} tokens; goal {GOAL:.0%} of the roofline")
    print(f"{'samples':>8} {'ms':>9} {'roofline':>9} {'of it':>7} {'tokens/s':>10}")
    for samples in sizes:
        for number in range(2):  # the first one compiles and captures
            found = seconds_of_steps(engine, samples, prompt_tokens, tokens, number)
        step_s = median(seconds for seconds, _ in found)
        least_s = median(read_bytes(sizes_of_model, context, job.dtype) for _, context in found)
        least_s /= rates.best_bytes_per_s
        cells = f"{step_s * 1e3:>9.3f} {least_s * 1e3:>9.3f} {least_s / step_s:>7.1%} {samples / step_s:>10.0f}"
        print(f"{samples:>8} {cells}")
        job.record("decode", shape, samples=samples, step_s=step_s, least_s=least_s, steps=len(found))
    for samples in sizes[:1] if job.is_tiny else PROFILED:
        shares_of_step(job, shape, engine, samples, prompt_tokens, tokens)
    captured = engine.state.forward.module.captured
    for way, why in ({} if captured is None else captured.refusals).items():
        print(f"{shape}: steps {way}: {why}")
        job.record("decode", shape, way=way, refused=why)


def seconds_of_steps(
    engine: Engine, samples: int, prompt_tokens: int, tokens: int, number: int
) -> list[tuple[float, int]]:
    """Seconds of each step that decodes all samples and nothing else, and the tokens that they hold: a step waits for
    the one before it, and is computed until the next one waits for it."""
    add(engine, samples, prompt_tokens, tokens, number)
    found = []
    while engine.has_work:
        began = time.perf_counter()
        engine.step()
        seconds, record = time.perf_counter() - began, engine.last_step
        if record is not None and record.num_tokens == samples and not record.num_prefill_tokens:
            found.append((seconds, record.num_context_tokens))
    return found


def add(engine: Engine, samples: int, prompt_tokens: int, tokens: int, number: int) -> None:
    """Queue a sample of each of so many prompts, which are others for other numbers."""
    sampling = Sampling(max_tokens=tokens, stop_token_ids=())
    vocabulary = engine.model.config.get_text_config().vocab_size
    for uid in range(samples):
        ids = random_ids(prompt_tokens, vocabulary, 1000 * number + uid)
        engine.add(Request(Prompt(uid, "", ids), 1, sampling, NoiseKey(0, number)))


def shares_of_step(job: Job, shape: str, engine: Engine, samples: int, prompt_tokens: int, tokens: int) -> None:
    """What a step's device time goes to, kernel by kernel, by torch's profiler; what a step takes beyond these, the
    device waits for the host."""
    add(engine, samples, prompt_tokens, tokens, 2)
    while len(engine.said) < samples:
        engine.step()
    engine.step()
    synchronize(job.device)
    steps = min(MOST_PROFILED, tokens // 3)
    with profiled(job.device) as profiler:
        began = time.perf_counter()
        for _ in range(steps):
            engine.step()
        synchronize(job.device)
        step_s = (time.perf_counter() - began) / steps
    engine.halt(parks=False)
    title = f"{shape}, {samples} samples"
    say_kernels(job, "decode", shape, title, profiler, step_s, steps, samples=samples)


def read_bytes(shape: ModelShape, context: int, dtype: str) -> float:
    """What a step reads at least: weights once (the embedding as the head, to which it is tied), keys and values."""
    kv = 2 * shape.layers * shape.kv_heads * shape.head_dim * context
    return BYTES[dtype] * (shape.parameters + kv)


if __name__ == "__main__":
    sys.exit(main())
