"""What `assert_equal_runs` takes for the same, on folders that are written here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.runs.plans import assert_equal_runs


def written_run(folder: Path, loss: float | str) -> Path:
    (folder / "final").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "actor/loss": loss}) + "\n")
    save_file({"weight": torch.ones(2)}, folder / "final/model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("found", "expected", "are_equal"),
    [
        ("NaN", "NaN", True),
        ("Infinity", "Infinity", True),
        ("-Infinity", "Infinity", False),
        ("NaN", 1.0, False),
        (1.0, "NaN", False),
        (1.0, "Infinity", False),
        (2.0 + 1e-9, 2.0, True),
        (2.0 + 3e-9, 2.0, False),
        (1e-9, 0.0, True),
        (2e-9, 0.0, False),
    ],
)
def test_metrics_are_equal_within_a_tolerance_and_without_a_number(
    tmp_path: Path, found: float | str, expected: float | str, are_equal: bool
) -> None:
    runs = written_run(tmp_path / "found", found), written_run(tmp_path / "expected", expected)
    if are_equal:
        assert_equal_runs(*runs)
        return
    with pytest.raises(AssertionError, match="actor/loss"):
        assert_equal_runs(*runs)
