"""Answer the prompts of a file: responses and figures of speed out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from signal import Signals
from typing import Protocol

from plait.cost.measured.rates import measure_rates
from plait.data.records import Sample
from plait.generation.engine import Engine
from plait.generation.request import Request
from plait.kept_memory import give_back_freed
from plait.models.loading import load_model
from plait.runtime.evaluating.generate_job import Asked, Job
from plait.runtime.evaluating.generation_report import GenerationReport, Meter, limit_of
from plait.runtime.steps.engine_loop import engine_loop
from plait.runtime.stopping import stop_signals
from plait.schedule.work import Done, to_the_end
from plait.stop_signals import STOP_SIGNALS, raise_lost


class Shown(Protocol):
    """What of `observe.progress.Progress` is called here."""

    def start(self, steps_done: int = 0) -> None: ...
    def phase(self, name: str, total: int = 0, unit: str = "") -> None: ...
    def advance(self, count: int = 1, *, note: str = "") -> None: ...
    def message(self, text: str) -> None: ...


def answer_alone(
    job: Job, asked: Asked, keep: Callable[[Sample], None], progress: Shown, done: Collection[tuple[int, int]]
) -> GenerationReport:
    """As `answer`, where no other process computes beside this one; also measures what the machine can at most."""
    samples: list[Sample] = []

    def take(sample: Sample) -> None:
        samples.append(sample)
        keep(sample)

    report = answer(job, asked, take, progress, done)
    if not samples or not report.is_whole:
        return report
    rates = measure_rates(job.dtype, job.device)
    return replace(report, limit_s=limit_of(samples, asked.shape, job.dtype, asked.engine.max_running, rates))


def answer(
    job: Job,
    asked: Asked,
    keep: Callable[[Sample], None],
    progress: Shown,
    done: Collection[tuple[int, int]],
    *,
    stopped_by: Sequence[Signals] = STOP_SIGNALS,
) -> GenerationReport:
    """Answer every prompt in this process. A signal to stop ends it after the step under way: the samples that have
    ended are in the report.

    Args:
        keep: is given each sample as soon as it has ended.
        done: (row, sample) that have been drawn before and are left out; the others are the same as if all were drawn.

    Raises:
        ModelError: the model cannot be loaded.
    """
    engine = Engine(load_model(job.model, dtype=job.dtype, device=job.device), asked.engine)
    raise_lost()
    not_compiled = engine.state.forward.refusals.compiled
    for prompt_ids, token_ids, logprobs in asked.earlier:
        engine.speculates.recall(prompt_ids, token_ids, logprobs)
    give_back_freed()
    for request in asked.requests:
        _ask(engine, request, done)
    num_asked = engine.occupancy.num_waiting
    started = time.perf_counter()
    meter = Meter(is_kv_limited=asked.engine.kv_tokens is not None)
    num_samples = _drain(engine, meter, keep, progress, stopped_by)
    seconds = time.perf_counter() - started
    return GenerationReport(
        num_samples, num_asked, seconds, meter, not_compiled=not_compiled, speculation=engine.speculation
    )


def _ask(engine: Engine, request: Request, done: Collection[tuple[int, int]]) -> None:
    """Queue the samples of a prompt that are not done."""
    uid = request.prompt.uid
    finished = [index for index in range(request.num_samples) if (uid, index) in done]
    if len(finished) == request.num_samples:
        return
    engine.add(request)
    for index in finished:
        engine.abort(uid, index)


class _Metered:
    """An engine of this process alone, whose steps are measured: `engine_loop.SteppedEngine`."""

    ready = True

    def __init__(self, engine: Engine, meter: Meter) -> None:
        self._engine, self._meter = engine, meter

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def advance(self, call: str) -> tuple[Done, list[Sample]]:
        before = time.perf_counter()
        finished = self._engine.step()
        record = self._engine.last_step
        assert record is not None, "a step leaves a record"
        self._meter.step(record, time.perf_counter() - before, self._engine.occupancy.kv_bytes)
        return record.done(call, 0, units=len(finished)), finished


def _drain(
    engine: Engine, meter: Meter, keep: Callable[[Sample], None], progress: Shown, stopped_by: Sequence[Signals]
) -> int:
    """Step until no work is left or somebody says stop; how many samples ended."""
    num_samples = 0
    with stop_signals(progress.message, stopped_by) as stop, contextlib.suppress(KeyboardInterrupt):

        def take(finished: Sequence[Sample]) -> bool:
            nonlocal num_samples
            for sample in finished:
                keep(sample)
                num_samples += 1
            progress.advance(len(finished), note=meter.now(engine.occupancy))
            return False

        stop.doing = "stopping after this step, with the responses so far"
        progress.start()
        progress.phase("generate", engine.occupancy.num_waiting, "samples")
        to_the_end(engine_loop(_Metered(engine, meter), "generate", take, until=lambda: stop.asked))
    return num_samples
