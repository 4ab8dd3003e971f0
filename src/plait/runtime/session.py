"""An open run: its engines, directory and logs. The controller steps it; this file opens, saves and closes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import torch

from plait.checkpoint.store import Checkpoint, CheckpointStore
from plait.errors import RESUME, RunError
from plait.file_writes import why_not_written, writing
from plait.observe.beside_steps import BesideSteps
from plait.output import write_file
from plait.recipes.role_models import main_role, trained_roles
from plait.runtime.evaluating.engine_gate import check_engines
from plait.runtime.evaluating.evaluations import Evaluations
from plait.runtime.evaluating.measure import measure
from plait.runtime.folder.directory import BEFORE_ALL, RunDirectory
from plait.runtime.folder.export import marker_of, write_weights
from plait.runtime.folder.history import FINISHED, STOPPED, History, Origin
from plait.runtime.folder.moments import Moments
from plait.runtime.folder.patience import Spent, spent_patience
from plait.runtime.folder.progressed import Progressed, check_not_gone, check_steps, resumed_from
from plait.runtime.folder.stored_recipe import changed_keys, check_left, recipe_text
from plait.runtime.health.doctor import RunDoctor
from plait.runtime.health.inspected_run import InspectedRun
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.records import Records
from plait.runtime.steps.batches import Batches
from plait.runtime.steps.draft_knowledge import take_up_knowledge, writing_parts
from plait.runtime.steps.drawn import read_drawn, stored_drawn
from plait.runtime.steps.earlier_texts import recall_earlier
from plait.runtime.steps.executor import Executor
from plait.runtime.steps.opened_roles import open_roles
from plait.runtime.steps.rollout_moves import RolloutMoves
from plait.runtime.steps.step import StepState
from plait.runtime.utilisation import Utilisation
from plait.runtime.workers import Leading
from plait.workers.recorder import Recorder


class Session:
    """A run in a directory that `claim` gave. Use as a context manager.

    What may be refused (reward functions, the model) is opened first. Only then are the files of an earlier run
    cleared, or with `resume` cut back to its last checkpoint.
    """

    def __init__(
        self,
        prepared: Prepared,
        directory: RunDirectory,
        *,
        resume: bool,
        leading: Leading,
        origin: Origin | None = None,
    ) -> None:
        self.prepared = prepared
        self._leading = leading
        self._origin = origin or Origin.here()
        self.recipe = prepared.recipe
        self.directory = directory
        self.saved: int | None = None
        """Step of the newest checkpoint."""
        self._save_failed = self._has_final = False
        self.beside = BesideSteps()
        self._stack = contextlib.ExitStack()
        self._resume = resume

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self._note_end(kind, error)
        self._stack.close()

    def _note_end(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        ended = f"{kind.__name__}: {error}" if kind is not None else FINISHED if self._has_final else STOPPED
        self.history.end(ended, self.done.step)

    def _open(self, stack: contextlib.ExitStack) -> None:
        recipe, prepared = self.recipe, self.prepared
        self.store = CheckpointStore(self.directory.files.checkpoints, keep_last=recipe.checkpoint.keep_last)
        self.history = History(self.directory.path, resume=self._resume)
        checkpoint = self.store.latest() if self._resume else None
        check_not_gone(checkpoint, self.store, self.history.saved_step, self.directory.path)
        self.done = Progressed.at(checkpoint) if checkpoint else Progressed()
        check_steps(self.done, recipe.steps, recipe.run_dir)
        if checkpoint is not None:
            self.saved = checkpoint.step
            torch.set_num_threads(self.done.threads)
        self.done.threads = torch.get_num_threads()
        self.progress = stack.enter_context(self._leading.progress())
        if self._resume:
            check_left(self.directory.files.recipe, recipe, lambda: self.is_over)
            self.progress.message(resumed_from(checkpoint, self.store, self.history.saved_step, recipe.steps))
        self.recorder = Recorder(offset_s=self.done.clock_s)
        output = self.directory.files.reward_output
        join = partial(self._leading.workers, self.recorder, loads=checkpoint is not None)
        opened = open_roles(prepared, join, self.recorder, self.progress, stack, output)
        self.workers, self.roles, self.eval_functions, self.between_steps = (
            opened.workers,
            opened.roles,
            opened.eval_functions,
            opened.between_steps,
        )
        if checkpoint is not None:
            self.workers.checkpoint.load(checkpoint.folder, checkpoint.state.get("counts"), self.done.threads)
            self._publish_weights()
            take_up_knowledge(self.workers, recipe, checkpoint.folder, self.progress.message)
        check_engines(prepared, self.roles, self.between_steps)
        self.executor = Executor(prepared, self.roles, self.recorder, self.progress, self.between_steps.clock)
        self.feed = prepared.feed(self.done.prompts_drawn)
        self.utilisation = Utilisation(prepared)
        self.batches = Batches(self.feed, recipe.prompts_per_step, self._drawn_before(checkpoint))
        with contextlib.ExitStack() as undo:
            if self._resume:
                self._cut_back(checkpoint)
                recall_earlier(self.workers, prepared, self.directory.files, self.done.step, self.batches.whole)
            else:
                undo.callback(self.directory.unbegin)
                self.directory.begin(recipe_text(recipe))
            with writing(self.directory.files.plan):  # of this stay: a run that is resumed may have another than before
                write_file(self.directory.files.plan, prepared.plan.to_json())
            self._write_history()
            undo.push(self._note_end)
            records = Records(prepared, self.directory, resume=self._resume, last_step=self.done.step)
            self.records = stack.enter_context(records)
            self.records.check_best_by()  # a resumed run may name another metric
            self.doctor = stack.enter_context(self._open_doctor()) if recipe.doctor.enabled else None
            self.moves = RolloutMoves.of(prepared, self.directory.files, self.done.step)
            rollout = self.executor.calls.rollout
            rollout.gate, rollout.rebalancer = self.moves.gate, self.moves.rebalancer
            tell, path = self.progress.message if prepared.asks_for_more else None, self.directory.files.moments
            self.moments = Moments.opened(path, recipe.update_rule, self.done.policy_version, tell)
            rollout.run_on(self.moments)
            undo.pop_all()

    @property
    def ended_early(self) -> Spent | None:
        """Why no further step is done, where some are left; as its evaluations say."""
        if self.done.step == self.recipe.steps:
            return None
        return spent_patience(self.directory.files.evaluations, self.recipe.evaluation, self.done.step)

    @property
    def is_over(self) -> bool:
        """Whether no step is left to do."""
        return self.done.step == self.recipe.steps or self.ended_early is not None

    def begin_step(self) -> StepState:
        """The batch of the next step, its samples drawn before or not, with the carried values."""
        state = self.batches.at(self.done.step)
        state.carried = {name: np.array(value, dtype=np.float64) for name, value in self.done.carried.items()}
        return state

    def end_step(self, state: StepState) -> None:
        """After the last call of a step: count it, keep what it leaves to the next one, and publish its weights as a
        new policy version."""
        self.done.step += 1
        self.done.policy_version += 1
        self.batches.end(state.step)
        if self.moments is not None:
            self.moments.keep(self.done.policy_version, self.batches.standing, self.batches.rounds)
        self.done.prompts_drawn = self.feed.drawn
        self.done.carried |= {name: value.tolist() for name, value in state.next_carried.items()}
        reference = self.recipe.reference
        if reference.sync_every and self.done.step % reference.sync_every == 0:
            self.workers.sync_references(reference.mixup)
        self._publish_weights()
        self.recorder.extend(self.workers.spans())
        self.moves.learn(state, self.recorder.peek(), self.roles)

    def _drawn_before(self, checkpoint: Checkpoint | None) -> list[StepState]:
        """The batches that were drawn and not trained on when a checkpoint was written, as they were then. Raises
        RunError."""
        if checkpoint is None or not checkpoint.state.get("open"):
            return []
        drawn = []
        for batch, prompts in read_drawn(checkpoint, self.feed.prompt):
            drawn.append(state := StepState(batch.step, prompts, batch.drawn, self.feed.given(batch.step)))
            self.executor.calls.rollout.restored(batch, state)
        return drawn

    @property
    def how_to_resume(self) -> str:
        """How a run that ends now can be resumed, in words."""
        if self.saved is None:
            return f"no step is saved; {RESUME} begins again at step 1, also by other keys"
        return (
            f"the checkpoint of step {self.saved} is good ({self.directory.files.checkpoints}/step-{self.saved}); "
            f"go on from it with {RESUME}"
        )

    def _publish_weights(self) -> None:
        """Tell the engines of roles whose weights have changed: they drop what older weights computed, and stamp later
        samples with the new policy version."""
        for model in self.prepared.models:
            if model.changes and (engine := self.roles[model.role].engine) is not None:
                engine.update_weights(self.done.policy_version)

    def evaluate(self, stop: Callable[[], bool] = lambda: False) -> Evaluations:
        """See `measure`. All ranks are asked now what they recorded of it: a next step, which asks, may not come."""
        self.executor.settle()
        measured = measure(
            self.prepared, self.roles, self.eval_functions, self.executor.calls, self.between_steps, stop=stop
        )
        self.recorder.extend(self.workers.spans())
        return measured

    def record_evaluation(self, evaluation: Evaluations) -> None:
        """Write an evaluation of the weights as they are; the best one's are kept in `best/`, unless there is but one.

        Raises:
            RunError: the disk is full; or no evaluation has what the best one is chosen by.
        """
        step, metrics = self.done.step, evaluation.metrics()
        self.records.check_best_by(metrics)
        self.records.write_evaluation_samples(step, evaluation)
        if step > 0 and self.recipe.evaluation.every > 0 and self.records.value(metrics) > self.records.best_value():
            self._export("the best weights so far", self.directory.files.best)
        self.records.write_evaluation(step, evaluation)

    def record_step(self, state: StepState, metrics: Mapping[str, float]) -> None:
        """Write the step's row, samples and actions."""
        self.records.write_step(self.done.step, state, metrics, self.recorder.take().spans)

    def save(self) -> None:
        """A checkpoint of everything that the rest of the run depends on; none if this step has one.

        Raises:
            RunError: the disk is full; the last checkpoint stays good.
        """
        if self.saved == self.done.step:
            return
        self.done.clock_s = self.recorder.now_s
        if self.moments is not None:
            self.moments.recompute(self.done.policy_version)
        try:
            offsets = self.records.sync()
            if self.doctor is not None:
                self.doctor.sync()
            tensors, opened = stored_drawn(self.batches.whole)
            trained = trained_roles(self.prepared.models)
            state = {"done": vars(self.done), "offsets": offsets, "trained": trained, **opened}
            parts = writing_parts(self.workers, self.recipe, self.progress.message)
            self.store.save(self.done.step, tensors, state, parts)
        except (OSError, RunError) as error:
            self._save_failed = True
            if isinstance(error, RunError):
                raise
            why = why_not_written(self.directory.path / "logs", error)
            raise RunError(
                f"the logs in {self.directory.path} cannot be written: {why}; {self.how_to_resume}"
            ) from error
        self.saved = self.done.step
        self.history.saved(self.saved)

    def rescue(self) -> str:
        """After an error: save the last step if it is whole and has no checkpoint. Returns `how_to_resume`; an empty
        text if the error was one of saving, which says it itself."""
        if self._save_failed:
            return ""
        whole = self.records.last_step == self.done.step and not self.executor.is_training
        if whole and self.done.step > 0 and self.saved != self.done.step:
            not_saved = f"step {self.done.step} is not saved"
            try:
                if why := self.workers.give_up():
                    return f"{not_saved}, since {why}; {self.how_to_resume}"
                self.save()
            except RunError as error:
                return str(error)
            except Exception as error:  # the error that broke off the run is the one to go on up
                return f"{not_saved}: {type(error).__name__}: {error}; {self.how_to_resume}"
        return self.how_to_resume

    def export_final(self) -> None:
        """With which a run is over. Raises RunError when the disk is full."""
        self._export("the final weights", self.directory.files.final)
        self._has_final = True

    def _export(self, what: str, folder: Path) -> None:
        role = main_role(self.prepared.models).role
        whose = marker_of(self.directory.path, self.done.step, role)
        write_weights(self.workers.gather(role), folder, what, whose, adapter=self.recipe.lora.rank > 0)

    def _open_doctor(self) -> RunDoctor:
        return RunDoctor(
            InspectedRun(self.prepared.flow, self.roles, self.recipe, self.workers, self.between_steps),
            self.recipe.doctor,
            self.directory.files.doctor,
            resume=self._resume,
            last_step=self.done.step,
            tell=self.progress.message,
        )

    def _write_history(self) -> None:
        """Begin this stay; say which files and versions have changed since the one before."""
        recipe, plan, step = self.recipe, self.prepared.plan, self.done.step
        with writing(self.directory.path):
            for line in self.history.begin(self._origin, recipe, plan, step, self.progress.message):
                self.progress.message(f"warning: {line}")
        if step == 0 and self.history.files_changed and self.directory.files.evaluations.exists():
            self.progress.message("the evaluation before the first step is done again")
            self.directory.rollback_to({}, BEFORE_ALL)

    def _cut_back(self, checkpoint: Checkpoint | None) -> None:
        """Remove what the interrupted run wrote after its last checkpoint; store keys that have changed."""
        self.store.discard_after(self.done.step)
        offsets = checkpoint.stated("offsets", dict) if checkpoint else {}
        self.directory.rollback_to(offsets, self.done.step, is_over=self.is_over)
        recipe = self.directory.files.recipe
        if changed_keys(recipe, self.recipe):
            with writing(recipe):
                write_file(recipe, recipe_text(self.recipe))
