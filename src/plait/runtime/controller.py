"""The main loop of a run: generate, score, learn, publish the new weights, evaluate, record, save."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from plait.runtime.evaluation import Evaluation
from plait.runtime.executor import StepState, step_metrics
from plait.runtime.process import resident_bytes
from plait.runtime.recorder import seconds_by_call
from plait.runtime.session import Session


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    finished: bool
    """False when it was stopped before its last step."""
    step: int
    metrics: dict[str, float]
    """Of the last step."""
    before: dict[str, float] = field(default_factory=dict)
    before_rows: list[dict[str, Any]] = field(default_factory=list)
    """Items of the evaluation before the first step, in the order of `after`."""
    after: Evaluation | None = None


def train(session: Session) -> Outcome:
    """Run steps until the recipe's number is reached or a signal asks to stop; the step under way is finished first."""
    recipe, done = session.recipe, session.done
    metrics: dict[str, float] = {}
    with stop_signals() as stop:
        session.progress.start(done.step)
        if done.step == 0 and session.prepared.held_out and not done.before:
            first = session.evaluate()
            done.before, done.before_rows = first.metrics(), first.rows()
            session.record_evaluation(done.before)
        while done.step < recipe.steps and not stop.asked:
            started = time.perf_counter()
            prompts = session.stream.prompts(done.step)
            state = session.executor.run_step(done.step, prompts)  # generate → score → advantages → train
            done.step += 1
            publish_weights(session)
            metrics = finish_metrics(session, state, time.perf_counter() - started)
            if is_due(recipe.evaluation.every, done.step) and session.prepared.held_out:
                metrics |= evaluate_and_keep_best(session)
            session.record_step(state, metrics)
            session.progress.step_done(done.step, metrics)
            if is_due(recipe.checkpoint.every, done.step) or stop.asked:
                session.save()
        if done.step < recipe.steps:
            if not session.store.latest():
                session.save()
            return Outcome(False, done.step, metrics, done.before, done.before_rows)
        after = session.evaluate() if session.prepared.held_out else None
        session.save()
        session.export_final()
    return Outcome(True, done.step, metrics, done.before, done.before_rows, after)


def publish_weights(session: Session) -> None:
    """A new policy version: engines forget what the old weights computed."""
    session.done.policy_version += 1
    engine = session.actor.engine
    assert engine is not None
    engine.update_weights(session.done.policy_version)


def finish_metrics(session: Session, state: StepState, seconds: float) -> dict[str, float]:
    """All numbers of a step, times last."""
    metrics = step_metrics(session.prepared.flow, state)
    timeline = session.recorder.peek()
    for call, busy in seconds_by_call(timeline).items():
        metrics[f"timing_s/{call}"] = busy
    tokens = sum(len(s.prompt.token_ids) + len(s.token_ids) for rows in state.generated.values() for s in rows.samples)
    metrics["timing_s/step"] = seconds
    metrics["perf/throughput"] = tokens / seconds
    metrics["perf/resident_bytes"] = resident_bytes()
    metrics["training/policy_version"] = session.done.policy_version
    metrics["training/epoch"] = session.stream.epoch(session.done.step)
    return metrics


def evaluate_and_keep_best(session: Session) -> dict[str, float]:
    """Evaluate; a result that beats every earlier one has its weights kept in `best/`."""
    metrics = session.evaluate().metrics()
    value = metrics.get("eval/accuracy", metrics["eval/reward"])
    if not session.done.best or value > session.done.best["value"]:
        session.done.best = {"step": session.done.step, "value": value}
        session.export_best()
    return metrics


def is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


class _Stop:
    """Set by SIGINT or SIGTERM; a second signal interrupts at once."""

    asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def stop_signals() -> Iterator[_Stop]:
    """Catch SIGINT and SIGTERM while inside (in a main thread), and give the old handlers back."""
    stop = _Stop()
    try:
        old = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever runs us decides when to stop
        yield stop
        return
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
