"""Learning-rate schedules by hand, and bytes per parameter."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from plait.training.memory import parameter_bytes
from plait.training.settings import OptimizerSettings


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # Peak 8, warm-up of 2 steps, 6 steps in all: 4 steps of decay after the warm-up; step 6 is past the end.
        ("constant", [4, 8, 8, 8, 8, 8, 8]),
        ("linear", [4, 8, 8, 6, 4, 2, 0]),
        ("cosine", [4, 8, 8, 4 + 4 * 0.5**0.5, 4, 4 - 4 * 0.5**0.5, 0]),
    ],
)
def test_schedules_by_hand(schedule, expected):
    settings = OptimizerSettings(learning_rate=8, schedule=schedule, warmup_steps=2)
    assert [settings.learning_rate_at(step, 6) for step in range(7)] == pytest.approx(expected, abs=1e-12)


def test_a_run_shorter_than_its_warm_up():
    settings = OptimizerSettings(learning_rate=8, schedule="linear", warmup_steps=4)
    assert [settings.learning_rate_at(step, 2) for step in range(2)] == [2, 4]


@pytest.mark.parametrize("field", ["learning_rate", "epsilon", "max_grad_norm", "max_skipped_steps"])
def test_zero_is_refused(field):
    with pytest.raises(ValidationError, match=field):
        OptimizerSettings(**{field: 0})


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, -0.1)])
def test_betas_are_below_one(betas):
    with pytest.raises(ValidationError, match="betas"):
        OptimizerSettings(betas=betas)


def test_bytes_per_parameter():
    assert parameter_bytes("bfloat16", trained=True).total == 2 + 4 + 8 + 4
    assert parameter_bytes("float32", trained=True).total == 4 + 0 + 8 + 4
    assert parameter_bytes("float64", trained=True).total == 8 + 0 + 16 + 8
    assert parameter_bytes("bfloat16", trained=False).total == 2


def test_settings_and_memory_import_without_torch():
    code = "import plait.training.settings, plait.training.memory, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
