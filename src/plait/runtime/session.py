"""An open run: its engines, directory and logs. The controller steps it; this file opens, records and closes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from plait.checkpoint.store import Checkpoint, CheckpointStore
from plait.dataflow import Dataflow, Level
from plait.errors import ConfigError
from plait.models.language_model import save_pretrained
from plait.observe.progress import Progress
from plait.observe.run_log import RunLog
from plait.observe.trace import TraceWriter
from plait.observe.trackers import Trackers, check_trackers
from plait.rewards.pool import RewardPool
from plait.runtime.directory import RunDirectory
from plait.runtime.evaluation import Evaluation, evaluate
from plait.runtime.executor import Executor, StepState
from plait.runtime.prepare import Prepared, changed_keys, recipe_text
from plait.runtime.recorder import Recorder
from plait.runtime.roles import FunctionRole, ModelRole, RoleRuntime, model_roles
from plait.schedule.timeline import trace_events

RESUMABLE_KEYS = ("steps", "evaluation.", "checkpoint.", "trackers", "overwrite", "run_dir", "reward.timeout_s")
"""Keys that may differ when a run is resumed; every other one would change its result."""


@dataclass
class Progressed:
    """What a run has done so far; all of it is in every checkpoint."""

    step: int = 0
    """Training steps done."""
    policy_version: int = 0
    clock_s: float = 0.0
    threads: int = 0
    """Compute threads; a resumed run takes as many, because another number may round otherwise."""
    before: dict[str, float] = field(default_factory=dict)
    """Metrics of the evaluation before the first step."""
    best: dict[str, float] = field(default_factory=dict)
    """`step` and `value` of the best evaluation."""
    before_rows: list[dict[str, Any]] = field(default_factory=list)
    """Items of that evaluation, for the comparison at the end."""


class Session:
    """Use as a context manager."""

    def __init__(self, prepared: Prepared, directory: RunDirectory, *, resume: bool) -> None:
        self.prepared = prepared
        self.recipe = prepared.recipe
        self.directory = directory
        self._stack = contextlib.ExitStack()
        self._resume = resume

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.directory)
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def _open(self, stack: contextlib.ExitStack) -> None:
        recipe, prepared = self.recipe, self.prepared
        self.store = CheckpointStore(self.directory.checkpoints_path, keep_last=recipe.checkpoint.keep_last)
        checkpoint = self.store.latest() if self._resume else None
        self.done = Progressed(**checkpoint.state["done"]) if checkpoint else Progressed()
        if self._resume:
            self.store.discard_after(self.done.step)
            self.directory.rollback_to(checkpoint.state["offsets"] if checkpoint else {}, self.done.step)
        if checkpoint is not None:
            torch.set_num_threads(self.done.threads)
        self.done.threads = torch.get_num_threads()
        self.progress = stack.enter_context(Progress(recipe.steps))
        self.recorder = Recorder(offset_s=self.done.clock_s)
        pool = stack.enter_context(
            RewardPool(
                prepared.functions,
                timeout_s=recipe.reward.timeout_s,
                workers=recipe.reward.workers,
                on_error=recipe.reward.on_error,
                seed=recipe.seed,
                output=self.directory.reward_output_path,
            )
        )
        self.pool = pool
        pool.start(columns=prepared.splits.train.columns)
        models = model_roles(prepared.flow, recipe, frozenset({"reward"}))
        self.roles: dict[str, RoleRuntime] = {**models, "reward": FunctionRole(pool)}
        if checkpoint is not None:
            self._load(models, checkpoint)
        self.executor = Executor(prepared.flow, self.roles, recipe, self.recorder, self.progress)
        self.stream = prepared.stream()
        self._metrics: RunLog = stack.enter_context(self.directory.open_metrics(resume=self._resume))
        self._trace = TraceWriter(self.directory.trace_path, resume=self._resume)
        stack.callback(self._trace.close)
        self._trackers = stack.enter_context(
            Trackers(
                recipe.trackers, self.directory.path, recipe.model_dump(mode="json"), last_step=self.done.step or -1
            )
        )

    @property
    def actor(self) -> ModelRole:
        role = self.roles["actor"]
        assert isinstance(role, ModelRole)
        return role

    def evaluate(self) -> Evaluation:
        engine = self.actor.engine
        assert engine is not None
        return evaluate(engine, self.pool, self.prepared.held_out, self.recipe.sampling, self.progress)

    def record_step(self, state: StepState, metrics: Mapping[str, float]) -> None:
        """Write the step's row, samples and actions."""
        self._metrics.append({"step": self.done.step, **metrics})
        self.directory.write_samples(self.done.step, sample_rows(self.prepared.flow, state))
        self.record_actions()
        self._trackers.log(self.done.step, metrics)

    def record_evaluation(self, metrics: Mapping[str, float]) -> None:
        """A row of its own for the evaluation before the first step."""
        self._metrics.append({"step": self.done.step, **metrics})
        self._trackers.log(self.done.step, metrics)

    def record_actions(self) -> None:
        self._trace.append(trace_events(self.recorder.take().spans))

    def save(self) -> None:
        """A checkpoint of everything that the rest of the run depends on.

        Raises:
            RunError: the disk is full; the last checkpoint stays good.
        """
        self.done.clock_s = self.recorder.now_s
        self._metrics.sync()
        tensors = {
            f"{name}/{key}": tensor
            for name, role in self.roles.items()
            if isinstance(role, ModelRole)
            for key, tensor in role.trainer.state().items()
        }
        self.store.save(self.done.step, tensors, {"done": vars(self.done), "offsets": self.directory.offsets()})

    def export_best(self) -> None:
        save_pretrained(self.actor.model, self.directory.best_path)

    def export_final(self) -> None:
        save_pretrained(self.actor.model, self.directory.final_path)

    def _load(self, models: Mapping[str, ModelRole], checkpoint: Checkpoint) -> None:
        tensors = checkpoint.tensors()
        for name, role in models.items():
            role.trainer.load_state(
                {key.removeprefix(f"{name}/"): tensor for key, tensor in tensors.items() if key.startswith(f"{name}/")}
            )
            if role.engine is not None:
                role.engine.update_weights(self.done.policy_version)


@contextlib.contextmanager
def open_session(prepared: Prepared, *, resume: bool) -> Iterator[Session]:
    """Take the run directory and open the run in it.

    Raises:
        ConfigError: the folder is taken, or holds a run that `recipe` does not continue.
    """
    recipe = prepared.recipe
    check_trackers(recipe.trackers)
    if resume:
        directory = RunDirectory.resume(recipe.run_dir)
        changed = [k for k in changed_keys(directory.recipe_path, recipe) if not k.startswith(RESUMABLE_KEYS)]
        if changed:
            directory.close()
            raise ConfigError(
                f"--resume: `{recipe.run_dir}` was begun with other values of {', '.join(f'`{k}`' for k in changed)}; "
                f"give the recipe as it was (see {directory.recipe_path}), or begin a new run in another `run_dir`"
            )
    else:
        directory = RunDirectory.create(recipe.run_dir, recipe_text(recipe), overwrite=recipe.overwrite)
    with Session(prepared, directory, resume=resume) as session:
        yield session


def sample_rows(flow: Dataflow, state: StepState) -> Iterator[dict[str, Any]]:
    """One record per sample: text, tokens, log-probs, and every column (rewards, advantages …) by name.

    Samples that lost their reward stand there too, without columns. A flow of several rollouts names that of each
    sample under `rollout`.
    """
    for table, generated in state.generated.items():
        rows = state.tables[table]
        places = {sample.uid: position for position, sample in enumerate(rows.samples)}
        for sample in generated.samples:
            record: dict[str, Any] = {
                "uid": sample.uid,
                "prompt": sample.prompt.text,
                "response": sample.text,
                "finish_reason": sample.finish_reason.value,
                "policy_version": sample.policy_version,
                "prompt_ids": list(sample.prompt.token_ids),
                "token_ids": list(sample.token_ids),
                "sampling_logprobs": list(sample.logprobs),
            }
            if len(state.generated) > 1:
                record = {"rollout": flow.nodes[table].call, **record}
            position = places.get(sample.uid)
            if position is not None:
                start, stop = rows.offsets[position], rows.offsets[position + 1]
                for column, values in rows.columns.items():
                    if column.producer == table:
                        continue  # what generation itself said of the sample, recorded above
                    one = values[position] if column.level is Level.SAMPLE else values[start:stop].tolist()
                    record[column.name] = float(one) if column.level is Level.SAMPLE else one
            yield record
