"""`plait export RUN_DIR --out FOLDER`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter


def export(
    run_dir: Path,
    *,
    out: Path,
    step: int | None = None,
    dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16",
    overwrite: Annotated[bool, Parameter(negative="")] = False,
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
        Of the stored weights.
    overwrite
        Replace a folder that exists.
    """
    from plait.runtime.api import export_checkpoint

    written = export_checkpoint(run_dir, out, step=step, dtype=dtype, overwrite=overwrite)
    print(f"step {written} of {run_dir} written to {out}")
    return 0
