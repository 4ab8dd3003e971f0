"""Weights as a folder that Transformers or peft load: those of an open run, and those of a checkpoint. For the latter
nothing of the run is executed, neither its flow nor its rewards."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from plait.checkpoint.store import Checkpoint, CheckpointStore
from plait.data.files import why_no_file
from plait.dataflow.unfit import nearest
from plait.errors import ConfigError, ModelError, PlaitError, RunError
from plait.file_writes import why_not_written
from plait.models.backbone_model import TrainedWeights
from plait.models.files.saving import Exported, save_pretrained
from plait.models.model import Model
from plait.models.working_weights import in_order_of_modules
from plait.output import check_folder
from plait.recipes.recipe import DType, Recipe
from plait.recipes.role_models import role_model
from plait.runtime.folder.run_files import CHECKPOINTS, RECIPE
from plait.runtime.folder.stored_recipe import read_stored
from plait.workers.loading import build_models
from plait.workers.optimizer_state import read_masters


@dataclass(frozen=True)
class Written:
    """What an export wrote."""

    step: int
    role: str
    dtype: str


def export_checkpoint(
    run_dir: Path,
    out: Path,
    *,
    step: int | None = None,
    role: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
) -> Written:
    """Write what a run trained, as its checkpoint has it, as a Hugging Face folder (an adapter merged into its base).

    Args:
        step: of the checkpoint; None: the newest whole one.
        role: that was trained; None: what the run is for.
        dtype: of the stored weights; None: that of the run.
        overwrite: replace a folder that an earlier export wrote.

    Raises:
        ConfigError: there is no such run, checkpoint or role, or `out` may not be written.
        ModelError: the weights are not finite, or the model that the run began with cannot be read.
        RunError: the checkpoint is damaged, or the disk is full.
    """
    if not os.path.isfile(path := run_dir / RECIPE):
        raise ConfigError(
            f"RUN_DIR: `{run_dir}` holds no run of plait: its {RECIPE} {why_no_file(path)}; {_run_around(run_dir)}"
        )
    check_folder(out, "--out", overwrite=overwrite, inputs=(run_dir,))
    recipe = read_stored(run_dir / RECIPE)
    read = _read(recipe, partial(_checkpoint, run_dir, step), role, dtype)
    _write(read, out)
    return read.what


def export_whole(run_dir: Path, folder: Path) -> None:
    """Write the newest weights of a run's own purpose into its own folder, adapters merged.

    Raises:
        ConfigError: there is no checkpoint yet.
        ModelError: the weights are not finite.
        RunError: they cannot be read, or written.
    """
    _write(_read(read_stored(run_dir / RECIPE), partial(_checkpoint, run_dir, None), None, None), folder)


def _checkpoint(run_dir: Path, step: int | None) -> Checkpoint:
    store = CheckpointStore(run_dir / CHECKPOINTS, keep_last=1)
    steps = store.steps()
    if step is not None and step not in steps:
        listed = ", ".join(map(str, steps)) or "none"
        raise ConfigError(f"--step: `{run_dir}` has no checkpoint of step {step}; there are: {listed}")
    checkpoint = store.latest() if step is None else store.at(step)
    if checkpoint is None:
        raise ConfigError(f"RUN_DIR: `{run_dir}` has no checkpoint yet")
    return checkpoint


def _role(checkpoint: Checkpoint, stated: str | None) -> str:
    trained = trained_roles(checkpoint)
    if stated is not None and stated not in trained:
        raise ConfigError(f"--role: the run has not trained `{stated}`; it has trained: {', '.join(trained)}")
    return stated or trained[0]


def trained_roles(checkpoint: Checkpoint) -> list[str]:
    """Roles whose weights it has, the main one first. Early versions did not write them down."""
    if "trained" in checkpoint.state:
        return [str(role) for role in checkpoint.stated("trained", list)]
    in_parts = "counts" in checkpoint.state
    stored = checkpoint.stated("counts", dict) if in_parts else {name.split("/")[0] for name in checkpoint.tensors()}
    return [role for role in ("actor", "reward", "cost", "critic", "cost_critic") if role in stored]


@dataclass(frozen=True)
class _Read:
    """A model with the weights of a checkpoint."""

    model: Exported
    what: Written
    run: Path


def _read(recipe: Recipe, choose: Callable[[], Checkpoint], role: str | None, dtype: str | None) -> _Read:
    """The model of a role as a checkpoint has it. A run that goes on removes older checkpoints: where that is done
    before the weights are read, it is chosen again."""
    checkpoint = choose()
    role, dtype = _role(checkpoint, role), dtype or recipe.dtype.value
    recipe = recipe.model_copy(update={"dtype": DType(dtype), "device": "cpu"})
    model = build_models([role_model(role, recipe, trained=True)], recipe)[role]
    while True:
        try:
            if "counts" in checkpoint.state:
                read_masters(model, role, checkpoint.folder)
            else:
                _copy_masters(model.trained, checkpoint, role)
            return _Read(model, Written(checkpoint.step, role, dtype), checkpoint.folder.parent.parent)
        except (PlaitError, OSError):
            if checkpoint.folder.exists():
                raise
            checkpoint = choose()


def _write(read: _Read, out: Path) -> None:
    step = read.what.step
    marker = marker_of(read.run, step, read.what.role)
    try:
        save_pretrained(read.model, out, marker=marker)
    except ModelError as error:
        raise ModelError(f"step {step} of `{read.run}`: {error}") from error
    except (OSError, SafetensorError) as error:
        raise RunError(f"--out: the weights of step {step} cannot be written to `{out}`: {error}") from error


@torch.no_grad()
def _copy_masters(trained: TrainedWeights, checkpoint: Checkpoint, role: str) -> None:
    """From a checkpoint of an early version, which had them in one buffer, in the order of the model's modules."""
    stored, masters = in_order_of_modules(trained.layout), checkpoint.tensors().get(f"{role}/masters")
    if masters is None or masters.shape != (stored.num_elements,):
        found = "none" if masters is None else f"{masters.numel()}"
        raise RunError(
            f"{checkpoint.folder}: expected {stored.num_elements} weights of `{role}`, found {found}; the model that "
            "the run began with has been replaced since"
        )
    of_blocks = {block: masters[start:stop] for block, start, stop in stored.entries}
    for block, start, stop in trained.layout.entries:
        trained.weights[start:stop].copy_(of_blocks[block])


def _run_around(folder: Path) -> str:
    """What to give in place of a folder that is no run: of a checkpoint, its run and step; of several stages, one."""
    run, step = folder.parent.parent, folder.name.removeprefix("step-")
    if folder.parent.name == CHECKPOINTS and step.isdecimal() and os.path.isfile(run / RECIPE):
        return f"it is a checkpoint of the run `{run}`: give that, with `--step {step}`"
    if os.path.isfile(folder.parent / RECIPE):
        whole = "it is a Hugging Face folder already; " if os.path.isfile(folder / "config.json") else ""
        return f"{whole}the run is `{folder.parent}`: give that"
    inside = sorted(folder.glob(f"*/{RECIPE}")) if os.path.isdir(folder) else ()
    stages = ", ".join(f"`{path.parent}`" for path in inside)
    if stages:
        return f"give one of {stages}"
    beside = [] if os.path.exists(folder) else [path.parent.name for path in folder.parent.glob(f"*/{RECIPE}")]
    return f"give the folder of a run{nearest(folder.name, beside)}"


def marker_of(run_dir: Path, step: int, role: str) -> dict[str, Any]:
    """What is said in a folder of weights: whose they are."""
    from plait import __version__

    return {"run": run_dir.resolve().name, "step": step, "role": role, "plait": __version__}


def write_weights(model: Model, folder: Path, what: str, marker: Mapping[str, Any], *, adapter: bool) -> None:
    """A model with its weights as they are.

    Args:
        what: for the error.
        marker: see `marker_of`.
        adapter: its adapter alone, in peft's form.

    Raises:
        RunError: the weights are not finite, or the disk is full.
    """
    try:
        if adapter:
            from plait.models.lora_files import save_adapter

            save_adapter(model, folder, marker=marker)
        else:
            save_pretrained(model, folder, marker=marker)
    except OSError as error:
        raise RunError(f"{what} cannot be written to {folder}: {why_not_written(folder, error)}") from error
    except (SafetensorError, ModelError) as error:
        raise RunError(f"{what} cannot be written to {folder}: {error}") from error
