"""What a run writes about itself, step by step: metrics, samples, evaluations, the trace, trackers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Self

from plait.data.records import Sample
from plait.data.supports import Supports
from plait.dataflow import Dataflow, Level
from plait.dataflow.call_name import numbered
from plait.errors import RunError
from plait.metric_names import WRITTEN, with_logged
from plait.observe.run_log import RunLog, damaged, numbers_of, read_rows, read_steps, write_rows
from plait.observe.trace import TraceWriter
from plait.observe.trackers import Trackers
from plait.recipes.keys import nearest
from plait.runtime.evaluating.evaluation import data_columns, told_of_turns
from plait.runtime.evaluating.evaluations import Evaluations, in_set
from plait.runtime.folder.directory import RunDirectory
from plait.runtime.folder.patience import value_by
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.steps.step import StepState, by_model, reward_calls
from plait.schedule.timeline import Span, trace_events


class Records:
    """The open logs of a run; use as a context manager.

    `last_step` is the step after which the run goes on. The directory has been cut back to it.

    Every method that writes raises RunError when the file system refuses it.
    """

    def __init__(self, prepared: Prepared, directory: RunDirectory, *, resume: bool, last_step: int) -> None:
        recipe = prepared.recipe
        self._prepared = prepared
        self._directory = directory
        self.last_step = last_step
        """The last step whose row, samples and actions are all written."""
        self._late: dict[str, float] = {}
        """Metrics of the last step, which trackers get together with the evaluation that follows it."""
        with ExitStack() as stack:
            config = recipe.model_dump(mode="json")
            self._trackers = stack.enter_context(
                Trackers(recipe.trackers, directory.path, config, last_step=last_step or -1)
            )
            self._tracked = last_step or -1
            self._metrics = stack.enter_context(RunLog(directory.files.metrics, resume=resume))
            self._evaluations = stack.enter_context(RunLog(directory.files.evaluations, resume=resume))
            self._trace = stack.enter_context(TraceWriter(directory.files.trace, resume=resume))
            self._evaluated = {row["step"] for row in read_steps(directory.files.evaluations)}
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        with self._stack:
            if self._late:
                self._track(self.last_step, self._late)

    def write_step(self, step: int, state: StepState, metrics: Mapping[str, float], spans: Iterable[Span]) -> None:
        """A step's samples, actions and row. Raises RunError also where the folder is no longer that of the run."""
        self._directory.check_in_place()
        if state.generated:
            write_rows(self._directory.files.samples(step), sample_rows(self._prepared.flow, state))
        self.write_actions(spans)
        self._metrics.append({"step": step, **metrics})
        self.last_step = step
        evaluated = any(name.startswith("eval/") for name in metrics)
        if step == self._prepared.recipe.steps and self._prepared.num_held_out and not evaluated:
            self._late = dict(metrics)
        else:
            self._track(step, metrics)

    def write_actions(self, spans: Iterable[Span]) -> None:
        """Actions of a step, or of what was done between two."""
        self._trace.append(trace_events(spans))

    def write_evaluation(self, step: int, evaluation: Evaluations) -> None:
        """An evaluation's row, which says that it is whole: its items and what follows from it are written before."""
        if step not in self._evaluated:  # else only its items were gone: it is of the same weights
            self._evaluations.append({"step": step, **evaluation.metrics()})
            self._evaluated.add(step)
        if step in (0, self.last_step):
            self._track(step, self._late | evaluation.metrics())
            self._late = {}

    def write_evaluation_samples(self, step: int, evaluation: Evaluations) -> None:
        write_rows(self._directory.files.evaluation_samples(step), evaluation.rows())

    def evaluation(self, step: int) -> Evaluations | None:
        """The evaluation of the weights after `step`, as it was written; None if it or its items are gone.

        Raises:
            DataError: its file is damaged.
        """
        log = self._directory.files.evaluations
        row = next((row for row in read_steps(log) if row["step"] == step), None)
        path = self._directory.files.evaluation_samples(step)
        if row is None or not path.exists():
            return None
        items = read_rows(path)
        try:
            return Evaluations.from_rows(items, self._prepared.held_out, numbers_of(row, log))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged(path, repr(error)) from error

    def value(self, metrics: Mapping[str, float]) -> float:
        """What evaluations are compared by, higher is better: `evaluation.best_by`, else as of `value_of`."""
        best_by = self._prepared.recipe.evaluation.best_by
        if best_by is None:
            return value_of(metrics, next((one.label for one in self._prepared.held_out), ""))
        return value_by(best_by, metrics)

    def check_best_by(self, *newest: Mapping[str, float]) -> None:
        """Raises RunError where there are evaluations, those written or `newest`, and none of them has the metric of
        `evaluation.best_by`."""
        best_by = self._prepared.recipe.evaluation.best_by
        if best_by is None:
            return
        name = best_by.removeprefix("-")
        evaluations = [*read_steps(self._directory.files.evaluations), *newest]
        if not evaluations or any(name in metrics for metrics in evaluations):
            return
        metrics = sorted(evaluations[-1].keys() - {"step"})
        have = ", ".join(f"`{metric}`" for metric in metrics)
        group = "eval/"  # which all have, so that it makes none of them nearer
        near = nearest(name.removeprefix(group), [metric.removeprefix(group) for metric in metrics], group)
        raise RunError(f"`evaluation.best_by`: no evaluation has a metric `{name}`; they have {have}{near}")

    def best_value(self) -> float:
        """The best value of an evaluation after a step; −∞ if there is none."""
        log = self._directory.files.evaluations
        rows = [numbers_of(row, log) for row in read_steps(log) if row["step"] > 0]
        values = [self.value(row) for row in rows]
        return max((value for value in values if not math.isnan(value)), default=-math.inf)

    def last_metrics(self) -> dict[str, float]:
        """The row of the last step; empty if there is none."""
        rows = read_steps(self._directory.files.metrics)
        return numbers_of(rows[-1], self._directory.files.metrics) if rows else {}

    def sync(self) -> dict[str, int]:
        """Force the logs to disk; their lengths in bytes, for a checkpoint. Raises OSError."""
        self._metrics.sync()
        self._evaluations.sync()
        return self._directory.offsets()

    def _track(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self._tracked:  # a tracker takes each step once: one that a resumed run repeats it has already
            self._trackers.log(step, metrics)
            self._tracked = step


def value_of(metrics: Mapping[str, float], label: str) -> float:
    """What evaluations are compared by unless a recipe says it: accuracy where there is one, else the mean reward; of
    given samples the loss, negated. Of the set of this label, the first."""
    for name in (in_set(label, "eval/accuracy"), in_set(label, "eval/reward")):
        if name in metrics:
            return metrics[name]
    begin = in_set(label, "eval/")
    losses = (value for name, value in metrics.items() if name.startswith(begin) and name.endswith("/loss"))
    return -next(losses, math.nan)


def sample_rows(flow: Dataflow, state: StepState) -> Iterator[dict[str, Any]]:
    """One record per sample: text, the columns of its row of the data, tokens, log-probs, every column of the flow
    (rewards, advantages …) by name but for those of several numbers per token, a second one of a name as `NAME#2`, the
    prompts that functions of the flow wrote for it as `prompts/NAME`, what each reward function gave it, and what they
    logged.

    Samples that lost their reward stand there too, without columns. `token_versions` says of each token which weights
    gave it, where they changed on the way; `support_sizes` how many tokens each was drawn from, where `sampling` leaves
    some out; `turns` and `replies` what was said in several turns. A flow of several
    rollouts names that of each sample under `rollout`.
    """
    for table, generated in state.generated.items():
        rows = state.tables[table]
        places = {sample.uid: position for position, sample in enumerate(rows.samples)}
        of_data, of_rewards = data_columns(generated.samples), _of_rewards(flow, state, table)
        for sample in generated.samples:
            record: dict[str, Any] = {
                "uid": sample.uid,
                "prompt": sample.prompt.text,
                "response": sample.text,
                **of_data[sample.prompt.uid],
                "finish_reason": sample.finish_reason.value,
                "policy_version": sample.policy_version,
                **({} if sample.token_versions is None else {"token_versions": list(sample.token_versions)}),
                "prompt_ids": list(sample.prompt.token_ids),
                "token_ids": list(sample.token_ids),
                "sampling_logprobs": list(sample.logprobs),
                **_kept_of(sample),
                **told_of_turns(sample),
            }
            if len(state.generated) > 1:
                record = {"rollout": flow.nodes[table].call, **record}
            position = places.get(sample.uid)
            if position is not None:
                start, stop = rows.offsets[position], rows.offsets[position + 1]
                for column, values in rows.columns.items():
                    if column.producer == table or column.width is not None:
                        continue  # what generation itself said of the sample, recorded above; many numbers per token
                    value = values[position] if column.level is Level.SAMPLE else values[start:stop].tolist()
                    name = numbered(column.name, record)
                    record[name] = float(value) if column.level is Level.SAMPLE else value
            for node, written in state.written.items():
                if flow.nodes[node].rows == table and sample.uid in written.prompts:
                    record[f"{WRITTEN}{flow.nodes[node].call}"] = written.prompts[sample.uid].text
            scores, logged = of_rewards.get(sample.uid, ({}, {}))
            yield with_logged(record | scores, logged, is_metric=False)


def _kept_of(sample: Sample) -> dict[str, list[int | None]]:
    """How many tokens each of a sample's was drawn from; None: the whole vocabulary. Empty where nothing was left out
    of any."""
    if sample.supports is None:
        return {}
    return {"support_sizes": [None if count < 0 else count for count in Supports(sample.supports).counts_R.tolist()]}


def _of_rewards(flow: Dataflow, state: StepState, table: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Sample → the score of each function and of each model, before weights; and the columns that functions logged."""
    told: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for node in (node for node in reward_calls(flow, state) if node.rows == table):
        for group in state.scores.get(node.id, ()):
            for place, sample in enumerate(group.samples):
                scores, before = told.get(sample.uid, ({}, {}))
                logged = with_logged(before, {name: values[place] for name, values in group.extras.items()})
                told[sample.uid] = (scores | group.told(place, str(node.role)), logged)
        for name, of_model in by_model(node, state).items():
            for uid, score in of_model.items():
                scores, _ = told.setdefault(uid, ({}, {}))
                scores[f"{node.role}s/{name}"] = None if math.isnan(score) else score
    return told
