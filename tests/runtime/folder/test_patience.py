"""When the evaluations of a folder say that a run ends, on logs by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from plait.recipes.evaluation_settings import EvaluationSettings
from plait.runtime.folder.patience import spent_patience


def log_of(folder: Path, values: list[float | None]) -> Path:
    """The log of evaluations after step 0, 10, 20, …; None: one without the metric."""
    told = [{} if value is None else {"eval/x": "NaN" if math.isnan(value) else value} for value in values]
    rows = [{"step": 10 * n, **row} for n, row in enumerate(told)]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "evaluations.jsonl"


def settings(best_by: str, patience: int) -> EvaluationSettings:
    return EvaluationSettings(items=1, every=10, best_by=best_by, patience=patience)


@pytest.mark.parametrize(
    ("values", "best_by", "patience", "ends"),
    [
        ([9.0, 1.0, 2.0, 2.0, 2.0], "eval/x", 2, 40),  # what was before the first step is not compared
        ([0.0, 1.0, 2.0, 2.0, 3.0, 1.0], "eval/x", 2, None),
        ([0.0, 1.0, 2.0, 2.0, 3.0, 1.0], "eval/x", 1, 30),
        ([0.0, 3.0, 2.0, 4.0, 5.0], "-eval/x", 2, 40),
        ([0.0, 3.0, 4.0, 2.0, 5.0], "-eval/x", 2, None),
        ([0.0, None, math.nan], "eval/x", 2, 20),
        ([0.0, 2.0, None, math.nan], "eval/x", 2, 30),
        ([0.0, 1.0, 1.0], "eval/x", 0, None),
    ],
)
def test_so_many_evaluations_without_a_better_one(
    tmp_path: Path, values: list[float | None], best_by: str, patience: int, ends: int | None
) -> None:
    log = log_of(tmp_path, values)
    ended = [step for step in range(0, 10 * len(values), 10) if spent_patience(log, settings(best_by, patience), step)]
    assert next(iter(ended), None) == ends


def test_what_is_said_of_it(tmp_path: Path) -> None:
    spent = spent_patience(log_of(tmp_path, [0.0, 3.0, 2.5, 4.0]), settings("-eval/x", 1), 30)
    assert spent is not None
    assert spent.text.startswith(
        "the run ends after step 30: the last evaluation was no better, `eval/x` was 2.5 after"
    )
    never = spent_patience(log_of(tmp_path, [0.0, None]), settings("eval/x", 1), 10)
    assert never is not None
    assert "`eval/x` was never a number" in never.text
    assert spent_patience(tmp_path / "none.jsonl", settings("eval/x", 1), 10) is None
