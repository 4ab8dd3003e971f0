"""What models whose layers keep a state are refused for, before any work."""

from __future__ import annotations

import pytest

from plait.errors import ConfigError
from plait.models.shape import ModelShape
from plait.recipes.recurrent_checks import check_prompts
from plait.recipes.role_models import RoleModel
from plait.schedule.plan import Placement, Plan
from tests.models.tiny import tiny_config

SHAPES = {name: ModelShape.from_config(tiny_config(name).to_dict()) for name in ("llama", "qwen3_5_text")}
MODELS = [RoleModel("actor", "qwen3_5_text", False, True, "model"), RoleModel("reward", "llama", True, False, "r")]


def test_its_prompts_are_computed_where_its_samples_are() -> None:
    places = (Placement("actor.generate", "prefill", (0,)), Placement("actor.generate", "decode", (1,)))
    with pytest.raises(ConfigError, match=r"^`plan` it: actor\.generate computes its prompts .*leave prefill out"):
        check_prompts(Plan("it", 2, places), MODELS, SHAPES, "`plan` it")
