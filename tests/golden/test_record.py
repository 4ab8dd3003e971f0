"""What counts as a difference between a run and its record; and that a run is caught by one unit in the last place."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from plait.recipes.algorithm import BUILT_IN
from tests.golden.cases import CASES
from tests.golden.record import differences, record_of

ROWS = [{"step": 1, "actor/loss": 0.1, "timing_s/step": 3.0}, {"step": 2, "actor/loss": math.nan, "perf/memory": 7}]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "samples").mkdir()
    (tmp_path / "final").mkdir()
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "samples/step-000001.jsonl").write_text('{"token_ids": [1, 2]}\n{"token_ids": [3], "reward": 1.0}\n')
    save_file({"w": torch.tensor([1.0, 2.0])}, tmp_path / "final/model.safetensors")
    return tmp_path


def test_times_and_memory_are_left_out_and_a_row_without_a_name_has_none(run_dir: Path) -> None:
    metrics = record_of(run_dir)["metrics"]
    assert metrics.keys() == {"step", "actor/loss"}
    assert metrics["step"] == [1, 2]
    assert metrics["actor/loss"][0] == 0.1


def test_a_run_is_equal_to_its_record_also_as_read_from_a_file(run_dir: Path) -> None:
    assert differences(json.loads(json.dumps(record_of(run_dir))), record_of(run_dir)) == ([], [])


def _next(number: float) -> float:
    return float(np.nextafter(number, math.inf))


def test_one_unit_in_the_last_place_of_a_metric_is_an_error_with_row_and_values(run_dir: Path) -> None:
    recorded = record_of(run_dir)
    found = copy.deepcopy(recorded)
    found["metrics"]["actor/loss"][0] = _next(0.1)
    assert differences(recorded, found) == (
        ["metrics: actor/loss, row 1: recorded 0.1, found 0.10000000000000002"],
        [],
    )


@pytest.mark.parametrize(("before", "now"), [(0.0, -0.0), (1.0, math.nan), (None, 1.0), (2, 3), (1.0, None)])
def test_values_that_differ(before: Any, now: Any) -> None:
    nothing: dict[str, Any] = {"evaluations": {}, "samples": {}, "weights": {}}
    errors, _ = differences({"metrics": {"m": [before]}} | nothing, {"metrics": {"m": [now]}} | nothing)
    assert len(errors) == 1


def test_means_of_rewards_may_differ_in_the_last_place_and_in_no_other() -> None:
    def record(name: str, value: float) -> dict[str, Any]:
        return {"metrics": {name: [value]}, "evaluations": {}, "samples": {}, "weights": {}}

    for name in ("rewards/sevens/mean", "greedy/rewards/model/mean", "costs/cost/mean"):
        assert differences(record(name, 0.1), record(name, _next(0.1))) == ([], [])
        assert len(differences(record(name, 0.1), record(name, 0.1 + 1e-12))[0]) == 1
    assert len(differences(record("reward", 0.1), record("reward", _next(0.1)))[0]) == 1


def test_whole_numbers_may_be_written_as_floats(run_dir: Path) -> None:
    recorded = record_of(run_dir)
    found = copy.deepcopy(recorded)
    found["metrics"]["step"] = [1.0, 2.0]
    assert differences(recorded, found) == ([], [])


def test_what_is_new_is_no_error_and_what_is_missing_is(run_dir: Path) -> None:
    recorded = record_of(run_dir)
    found = copy.deepcopy(recorded)
    found["metrics"]["more"] = [1, 2]
    found["samples"]["step-000001.jsonl"]["more"] = "0"
    assert differences(recorded, found) == (
        [],
        ["metrics: more is new", "samples: step-000001.jsonl more is new"],
    )
    errors, news = differences(found, recorded)
    assert errors == ["metrics: more is missing", "samples: step-000001.jsonl more is missing"]
    assert news == []


def test_a_step_less_is_an_error(run_dir: Path) -> None:
    recorded = record_of(run_dir)
    (run_dir / "metrics.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    errors, _ = differences(recorded, record_of(run_dir))
    assert "metrics: step has 1 rows, recorded are 2" in errors


def test_other_tokens_and_other_weights_are_errors_that_name_the_column_and_the_file(run_dir: Path) -> None:
    recorded = record_of(run_dir)
    (run_dir / "samples/step-000001.jsonl").write_text('{"token_ids": [1, 2]}\n{"token_ids": [4], "reward": 1.0}\n')
    save_file({"w": torch.tensor([1.0, _next(2.0)], dtype=torch.float64)}, run_dir / "final/model.safetensors")
    errors, _ = differences(recorded, record_of(run_dir))
    assert [error.split(" has ")[0] for error in errors] == [
        "samples: step-000001.jsonl token_ids",
        "weights: final/model.safetensors",
    ]


def test_every_algorithm_is_run_in_every_dtype() -> None:
    made = {(case.keys.get("algorithm"), case.keys.get("dtype")) for case in CASES.values()}
    assert {(name, dtype) for name in BUILT_IN for dtype in ("float64", "float32", "bfloat16")} <= made


def test_the_record_has_the_runs_of_the_table() -> None:
    recorded = json.loads(Path(__file__).with_name("record.json").read_text())["runs"]
    assert recorded.keys() == CASES.keys()
