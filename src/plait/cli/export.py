"""`plait export RUN_DIR --out FOLDER`."""

from __future__ import annotations

from typing import Literal

from plait.cli.app import Place, Whole
from plait.observe.screen import say


def export(
    run_dir: Place,
    *,
    out: Place,
    step: Whole | None = None,
    role: Literal["actor", "critic", "cost_critic", "reward", "cost"] | None = None,
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
    role
        Which of the models that the run trained: actor, critic, cost_critic, reward or cost; by default what the run
        is for.
    dtype
        float32, bfloat16 or float64, of the stored weights; by default that of the run.
    overwrite
        Replace a folder that an earlier export wrote.
    """
    from plait.runtime.folder.export import export_checkpoint

    written = export_checkpoint(run_dir, out, step=step, role=role, dtype=dtype, overwrite=overwrite)
    say(f"{written.role} of step {written.step} of {run_dir} written to {out} in {written.dtype}")
    return 0
