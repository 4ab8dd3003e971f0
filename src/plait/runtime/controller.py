"""The main loop of a run. A step generates, scores, trains, publishes the new weights, evaluates and records; then the
run is saved."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from signal import Signals

from plait.errors import RESUME, RunError
from plait.runtime.evaluating.answering import EvaluationStopped
from plait.runtime.evaluating.evaluations import Evaluations
from plait.runtime.finished_step import finish_metrics
from plait.runtime.session import Session
from plait.runtime.stopping import Stop, saying_how_to_resume, stop_signals
from plait.stop_signals import STOP_SIGNALS


@dataclass(frozen=True, repr=False)
class Outcome:
    """How a run ended. A notebook shows it in a few lines; `metrics`, `before` and `after` have all numbers."""

    finished: bool
    """False if the run was stopped before its last step was done and evaluated; that may be an earlier one than the
    recipe's, see `ended_early`."""
    step: int
    """Steps that are done."""
    metrics: dict[str, float]
    """Those of the last step."""
    before: Evaluations | None = None
    """The evaluation of the weights before the first step."""
    after: Evaluations | None = None
    """The evaluation of the weights after the last step."""
    doctor: str = ""
    """What the numerics doctor sums up; empty where all was well."""
    steps: int = 0
    """Steps of the whole run."""
    asked_to_stop: bool = False
    """Whether a signal asked for it, even if nothing was left to stop: later stages of the recipe do not begin then."""
    ended_early: str = ""
    """Why the run has finished before the last of its steps, in words (`evaluation.patience`); empty: it has not."""

    def __repr__(self) -> str:
        main = {name: value for name, value in self.metrics.items() if "/" not in name or name.endswith("/loss")}
        numbers = {"before": self.before and self.before.metrics(), "last step": main}
        numbers["after"] = self.after and self.after.metrics()
        lines = [f"{'finished' if self.finished else 'stopped'} after step {self.step} of {self.steps}"]
        for when, found in numbers.items():
            if found:
                lines.append(f"{when}: {', '.join(f'{name} {value:.4g}' for name, value in found.items())}")
        return "\n  ".join(["Outcome", *lines, f"({len(self.metrics)} metrics of the last step are in `metrics`)"])


def train(session: Session, stopped_by: Sequence[Signals] = STOP_SIGNALS) -> Outcome:
    """Run steps until as many are done as the recipe says, or its evaluations get no better; then evaluate and write
    the final weights. A signal asks to stop: the step under way is finished and saved first. `Session.done` counts the
    steps.

    Args:
        stopped_by: the signals that ask to stop.

    Raises:
        RunError: the run had to stop; the message says how it can be resumed.
        KeyboardInterrupt: a second signal.
    """
    recipe, done, records = session.recipe, session.done, session.records
    tell_user = session.progress.message
    on_error = saying_how_to_resume(tell_user, lambda: session.how_to_resume, session.rescue)
    with stop_signals(tell_user, stopped_by) as stop, on_error:
        session.progress.start(done.step)
        session.beside.take()  # what was compiled while it loaded
        metrics, before, after = records.last_metrics(), records.evaluation(0), None
        if before is None and done.step == 0:
            with session.beside.part("first evaluation", once=True):
                before = evaluate(session, stop, "leaving the evaluation before the first step")
        while not session.is_over and not stop.asked:
            stop.doing = f"finishing step {done.step + 1}, then saving"
            metrics = run_step(session)  # generate → score → advantages → train
            if is_due(recipe.checkpoint.every, done.step) or stop.asked or session.is_over:
                with session.beside.part("saving"):
                    session.save()
        if session.is_over:
            after = records.evaluation(done.step)
            if after is None:
                after = evaluate(session, stop, f"leaving the last evaluation, which {RESUME} makes up for")
        finished = session.is_over and (after is not None or not session.prepared.num_held_out)
        early = session.ended_early
        if finished and early is not None:
            tell_user(early.text)
        if finished:
            stop.doing = "writing the final weights"
            session.export_final()
    summary = session.doctor.summary() if session.doctor is not None else ""
    early_text = "" if early is None else early.text
    return Outcome(finished, done.step, metrics, before, after, summary, recipe.steps, stop.asked, early_text)


def run_step(session: Session) -> dict[str, float]:
    """Do one training step: run the calls of the algorithm's graph, publish the new weights, evaluate if that is due,
    and write the records. Returns the metrics of the step."""
    done = session.done
    started = time.perf_counter()
    state = session.begin_step()
    session.executor.run_step(state, session.batches)
    session.end_step(state)
    metrics = finish_metrics(session, state, time.perf_counter() - started)
    findings = session.doctor.after_step(state, metrics) if session.doctor is not None else ()
    if is_due(session.recipe.evaluation.every, done.step) and session.prepared.num_held_out:
        try:
            with session.beside.part("evaluation"):
                evaluation = session.evaluate()
                session.record_evaluation(evaluation)
        except RunError:
            session.record_step(state, metrics)  # the step itself is whole, and can be saved
            raise
        metrics |= evaluation.metrics()
    session.record_step(state, metrics)
    session.progress.step_done(done.step, metrics, *session.beside.take())
    if session.doctor is not None:
        session.doctor.stop_if_asked(findings)
    return metrics


def evaluate(session: Session, stop: Stop, doing: str) -> Evaluations | None:
    """Evaluate, and record the result; None if there is nothing to evaluate on, or a stop was asked for meanwhile.

    Args:
        doing: what the run does meanwhile, in words for a user who asks it to stop.
    """
    if not session.prepared.num_held_out:
        return None
    stop.doing = doing
    try:
        evaluation = session.evaluate(lambda: stop.asked)
    except EvaluationStopped:
        return None
    session.record_evaluation(evaluation)
    session.records.write_actions(session.recorder.take().spans)
    return evaluation


def is_due(every: int, step: int) -> bool:
    """Whether something that is done every so many steps (0: never) is done after this one."""
    return every > 0 and step % every == 0
