"""Whether the disk has room for what a run keeps, asked before its models are loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from plait.cost.estimate import human_bytes
from plait.cost.shape_parameters import adapter_parameters
from plait.errors import ConfigError
from plait.models.shape import ModelShape
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel, main_role
from plait.runtime.folder.progressed import last_step
from plait.runtime.folder.run_files import RunFiles
from plait.runtime.inputs.prepared import Prepared
from plait.training.memory import BYTES, parameter_bytes


@dataclass(frozen=True)
class KeptFiles:
    """The large files of a run, where they are most. Samples and logs are not among them.

    checkpoints:      that lie there at a time: one more than `checkpoint.keep_last` while the newest is written
    checkpoint_bytes: of each
    weights_bytes:    of the Hugging Face folders of the last weights, and of the best where evaluations find some
    """

    checkpoints: int
    checkpoint_bytes: int
    weights_bytes: int

    @classmethod
    def of(cls, prepared: Prepared) -> KeptFiles:
        recipe, main = prepared.recipe, main_role(prepared.models)
        count = lambda model: _trained_parameters(prepared.shapes[model.name], recipe)
        trained = [model for model in prepared.models if model.trained]
        saves = -(-recipe.steps // (recipe.checkpoint.every or recipe.steps))
        finds_best = 0 < recipe.evaluation.every <= recipe.steps and prepared.num_held_out > 0
        return cls(
            min(saves, recipe.checkpoint.keep_last + 1),
            sum(count(model) * _state_bytes(model, prepared.models, recipe) for model in trained),
            (1 + finds_best) * count(main) * BYTES[recipe.dtype],
        )

    @property
    def total_bytes(self) -> int:
        return self.checkpoints * self.checkpoint_bytes + self.weights_bytes

    def __str__(self) -> str:
        plural = "s" * (self.checkpoints > 1)
        each = " each" * (self.checkpoints > 1)
        return (
            f"{human_bytes(self.total_bytes)} of files ({self.checkpoints} checkpoint{plural} of "
            f"{human_bytes(self.checkpoint_bytes)}{each}, and weights of {human_bytes(self.weights_bytes)})"
        )


def check_disk(prepared: Prepared, files: RunFiles, *, resume: bool) -> None:
    """See that a run's folder, which is there, has room for what the run keeps. What an earlier run, or this one before
    it was stopped, has there already is replaced, and counts as free.

    Raises:
        ConfigError: it has not; names the keys.
    """
    recipe = prepared.recipe
    if resume and last_step(files.path, recipe.evaluation, recipe.steps) is not None:
        return
    kept, room = KeptFiles.of(prepared), os.statvfs(files.path)
    free = room.f_bavail * room.f_frsize
    replaced = sum(map(_bytes_in, (files.checkpoints, files.best, files.final)))
    is_known = room.f_blocks > 0  # but to some file servers
    if not is_known or kept.total_bytes <= free + replaced:
        return
    there = f", with {human_bytes(replaced)} of files that would be replaced" if replaced else ""
    fewer = ", lower `checkpoint.keep_last`" if kept.checkpoints > 2 else ""
    raise ConfigError(
        f"key `run_dir`: the run keeps up to {kept}, and {human_bytes(free)} are free on the disk of {files.path}"
        f"{there}; free space{fewer}, or give another `run_dir`"
    )


def _trained_parameters(shape: ModelShape, recipe: Recipe) -> int:
    return adapter_parameters(shape, recipe.lora) if recipe.lora.rank > 0 else shape.parameters


def _state_bytes(model: RoleModel, models: tuple[RoleModel, ...], recipe: Recipe) -> int:
    """Bytes of a checkpoint per trained parameter: its master, AdamW's moments, and the average that a role follows."""
    followed = any(other.follows == model.role for other in models)
    each = parameter_bytes(recipe.dtype, trained=True, followed=followed)
    return (each.masters or each.weights) + each.moments + each.average


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
