"""`plait export RUN_DIR --out FOLDER`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from plait.cli.app import Whole
from plait.errors import ConfigError
from plait.observe.screen import say


def export(
    run_dir: Path,
    *,
    out: Path,
    step: Whole | None = None,
    dtype: Literal["float32", "bfloat16", "float64"] | None = None,
    overwrite: bool = False,
) -> int:
    """Write a checkpoint of a run as a Hugging Face folder.

    Parameters
    ----------
    run_dir
        Folder of the run.
    out
        Folder to write.
    step
        Which checkpoint; by default the newest.
    dtype
        float32, bfloat16 or float64, of the stored weights; by default that of the run.
    overwrite
        Replace a folder that exists.
    """
    recipe_path = run_dir / "recipe.yaml"
    if not recipe_path.is_file():
        raise ConfigError(f"RUN_DIR: `{run_dir}` holds no run of plait (no recipe.yaml); give the folder of a run")
    if out.exists() and not overwrite:
        raise ConfigError(f"--out: `{out}` exists; give another folder, or --overwrite")

    from plait.runtime.recipes.recipe_file import load_recipe

    dtype = dtype or load_recipe(recipe_path).dtype.value
    if step is not None:
        check_step(run_dir, step)
    from plait.runtime.api import export_checkpoint

    written = export_checkpoint(run_dir, out, step=step, dtype=dtype, overwrite=overwrite)
    say(f"step {written} of {run_dir} written to {out} in {dtype}")
    return 0


def check_step(run_dir: Path, step: int) -> None:
    """Raises ConfigError where a run has no checkpoint of `step`; it names those there are."""
    from plait.checkpoint.store import CheckpointStore

    there = CheckpointStore(run_dir / "checkpoints", keep_last=1).steps()
    if step not in there:
        listed = ", ".join(map(str, there)) or "none"
        raise ConfigError(f"--step: `{run_dir}` has no checkpoint of step {step}; there are: {listed}")
