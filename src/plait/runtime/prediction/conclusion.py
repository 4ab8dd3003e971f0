"""What is done with a run's measurements when it has ended."""

from __future__ import annotations

import contextlib
from pathlib import Path

from plait.observe.run_log import read_steps
from plait.runtime.folder.history import History
from plait.runtime.folder.run_files import RunFiles
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.prediction.forecast import write_forecast
from plait.runtime.prediction.refinement import refine, steady_rows


def conclude(prepared: Prepared, folder: Path) -> None:
    """Leave the prediction beside what was measured in the run's folder, and correct the kept profile by it."""
    history, steps = History(folder, resume=True), read_steps(RunFiles(folder).metrics)
    with contextlib.suppress(OSError):  # a full disk has been said
        write_forecast(prepared, folder, [row for row in steps if row["step"] > history.comparable_from])
    refine(prepared, folder, steady_rows(steps, history.uncounted))
