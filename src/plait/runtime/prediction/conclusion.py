"""What is done with a run's measurements when it has ended."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from plait.observe.run_log import read_steps
from plait.runtime.folder.history import History
from plait.runtime.folder.run_files import RunFiles
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.prediction.forecast import write_forecast
from plait.runtime.prediction.refinement import refine


def conclude(prepared: Prepared, folder: Path) -> None:
    """Leave the prediction beside what was measured in the run's folder, and correct the kept profile by it."""
    rows = comparable_rows(folder)
    with contextlib.suppress(OSError):  # a full disk has been said
        write_forecast(prepared, folder, rows)
    refine(prepared, folder, rows)


def comparable_rows(folder: Path) -> list[dict[str, Any]]:
    """Metrics of the steps that were done by the run's plan of now, and on this machine: before it was resumed, it may
    have had others."""
    begun = History(folder, resume=True).comparable_from
    return [row for row in read_steps(RunFiles(folder).metrics) if row["step"] > begun]
