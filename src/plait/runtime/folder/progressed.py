"""How far a run is, as every checkpoint says it; and what a run says that is resumed from one."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from plait.checkpoint.step_folders import steps_in
from plait.checkpoint.store import Checkpoint, CheckpointStore
from plait.errors import ConfigError, RunError
from plait.recipes.evaluation_settings import EvaluationSettings
from plait.runtime.folder.patience import spent_patience
from plait.runtime.folder.run_files import RunFiles


@dataclass
class Progressed:
    """What a run has done so far; all of it is in every checkpoint."""

    step: int = 0
    """Training steps done."""
    policy_version: int = 0
    prompts_drawn: int = 0
    carried: dict[str, Any] = field(default_factory=dict)
    """Values that the flow keeps from step to step, as lists of numbers."""
    clock_s: float = 0.0
    threads: int = 0
    """Compute threads; a resumed run takes as many, because another number may round otherwise."""

    @classmethod
    def at(cls, checkpoint: Checkpoint) -> Progressed:
        """What a checkpoint says. Raises RunError where that is not all of it, or of another kind."""
        stated = checkpoint.stated("done", dict)
        is_ours = "step" in stated and stated.keys() <= {entry.name for entry in fields(cls)}
        numbers = {name: value for name, value in stated.items() if name != "carried"}
        whole = is_ours and isinstance(stated.get("carried", {}), dict)
        if not whole or not all(type(value) in (int, float) for value in numbers.values()):
            raise RunError(f"{checkpoint.folder}: expected how far the run was, found {stated!r:.100}")
        return cls(**stated)


def last_step(folder: Path, settings: EvaluationSettings, steps: int) -> int | None:
    """The step of the newest checkpoint of a run, whole or not, if that is its last one: of `steps`, or where its
    patience with its evaluations was spent; None: steps are left.

    Raises:
        DataError: the log of its evaluations is damaged.
    """
    files = RunFiles(folder)
    newest = next(reversed(steps_in(files.checkpoints)), None)
    if newest is None or newest == steps:
        return newest
    return None if spent_patience(files.evaluations, settings, newest) is None else newest


def has_checkpoint(checkpoints: Path) -> bool:
    """Whether a run that is resumed goes on from a checkpoint, or cannot go on: whether one is whole is not checked."""
    return bool(steps_in(checkpoints))


def check_not_gone(checkpoint: Checkpoint | None, store: CheckpointStore, saved_step: int, run_dir: Path) -> None:
    """Raises ConfigError where a run would begin again at step 1, though a checkpoint of `saved_step` was written."""
    if checkpoint is None and saved_step > 0:
        raise ConfigError(
            f"key `run_dir`: `{store.folder}` has no checkpoint, though one of step {saved_step} was "
            f"written; nothing in `{run_dir}` has been touched. Put the folder back, or start over "
            "(another `run_dir`, or `overwrite: true`)"
        )


def check_steps(done: Progressed, steps: int, run_dir: Path) -> None:
    """Raises ConfigError where a run has done more steps than it is to have."""
    if done.step > steps:
        raise ConfigError(
            f"`steps` is {steps}, but the run in `{run_dir}` has done {done.step}; "
            f"give {done.step} or more, or begin a new run in another `run_dir`"
        )


def resumed_from(checkpoint: Checkpoint | None, store: CheckpointStore, saved_step: int, steps: int) -> str:
    """A line for the user: which checkpoint a run of so many steps goes on from, and which newer ones it cannot."""
    if checkpoint is None:
        return "no step is saved yet: the run begins again at step 1"
    damaged = [step for step in store.steps() if step > checkpoint.step]
    text = f"resuming after step {checkpoint.step} of {steps}, from {checkpoint.folder}"
    if damaged:
        which = f"checkpoint{'s' * (len(damaged) > 1)} of step {', '.join(map(str, damaged))}"
        text += f"; the {which} cannot be used: damaged, and its steps are done again"
    elif saved_step > checkpoint.step:
        text += f"; the checkpoint of step {saved_step} is gone, and the steps up to it are done again"
    return text
