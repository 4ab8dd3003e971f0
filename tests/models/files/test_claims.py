"""What is read of a config.json: numbers that may be infinite, and those that may not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from plait.errors import ModelError
from plait.models.files.claims import read_configuration
from tests.models.tiny import tiny_config


def written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "config.json").write_text(text)
    return tmp_path / "config.json"


def test_limits_of_time_steps_may_be_infinite(tmp_path: Path) -> None:
    """As Transformers writes them, and as Python does, which is how Nemotron-H is published."""
    tiny_config("bamba").save_pretrained(tmp_path)
    assert read_configuration(tmp_path / "config.json")["time_step_limit"] == [0.0, math.inf]
    assert read_configuration(written(tmp_path, '{"time_step_limit": [0.0, Infinity]}')) == {
        "time_step_limit": [0.0, math.inf]
    }
    assert read_configuration(written(tmp_path, '{"text_config": {"time_step_limit": [0, Infinity]}}'))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, [1, math.nan], {"factor": math.inf}])
def test_no_other_number_may_be(value: object, tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({"model_type": "llama", "rope_theta": value}))
    with pytest.raises(
        ModelError, match=r"config\.json should hold a finite number in `(rope_theta|factor)`; fetch or"
    ):
        read_configuration(path)
