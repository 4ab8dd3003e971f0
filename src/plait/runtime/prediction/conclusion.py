"""What is done with a run's measurements when it has ended."""

from __future__ import annotations

import contextlib
from pathlib import Path

from plait.runtime.inputs.prepared import Prepared
from plait.runtime.prediction.forecast import write_forecast
from plait.runtime.prediction.refinement import refine


def conclude(prepared: Prepared, folder: Path) -> None:
    """Leave the prediction beside what was measured in the run's folder, and correct the kept profile by it."""
    with contextlib.suppress(OSError):  # a full disk has been said
        write_forecast(prepared, folder)
    refine(prepared, folder)
