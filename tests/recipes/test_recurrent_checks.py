"""What models whose layers are recurrent are refused for, before any work."""

from __future__ import annotations

import contextlib

import pytest

from plait.errors import ConfigError
from plait.models.shape import ModelShape
from plait.recipes import recurrent_checks
from plait.recipes.recurrent_checks import check_kernels, check_prompts
from plait.recipes.role_models import RoleModel
from plait.schedule.plan import Placement, Plan
from tests.models.tiny import tiny_config
from tests.recipes.test_checks import recipe_of

FAMILIES = ("llama", "qwen3_5_text", "bamba", "lfm2")
SHAPES = {name: ModelShape.from_config(tiny_config(name).to_dict()) for name in FAMILIES}
MODELS = [RoleModel("actor", "qwen3_5_text", False, True, "model"), RoleModel("reward", "llama", True, False, "r")]


@pytest.mark.parametrize("installed", [False, True])
def test_a_library_for_linear_attention_takes_no_float32(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_checks, "find_spec", lambda name: "found" if installed and name == "fla" else None)
    asked = {"device": "cuda", "dtype": "float32"}
    said = r"^`dtype` is float32, but flash-linear-attention, .*`qwen3_5_text` on GPUs.*set it to bfloat16, or"
    with pytest.raises(ConfigError, match=said) if installed else contextlib.nullcontext():
        check_kernels(recipe_of(**asked), MODELS, SHAPES)
    for served in ({"device": "cpu"}, {"dtype": "bfloat16"}):
        check_kernels(recipe_of(**asked | served), MODELS, SHAPES)
    others = [RoleModel("actor", family, False, True, "model") for family in ("llama", "bamba", "lfm2")]
    check_kernels(recipe_of(**asked), others, SHAPES)


def test_its_prompts_are_computed_where_its_samples_are() -> None:
    places = (Placement("actor.generate", "prefill", (0,)), Placement("actor.generate", "decode", (1,)))
    with pytest.raises(ConfigError, match=r"^`plan` it: actor\.generate computes its prompts .*leave prefill out"):
        check_prompts(Plan("it", 2, places), MODELS, SHAPES, "`plan` it")
