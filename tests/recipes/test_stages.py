"""What is said of keys that there are not, of a recipe's stages all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.errors import ConfigError, DataError, FlowError
from plait.recipes.stages import in_stage, load_stages, unknown_in

PLAIN = """
model: m
steps: 1
data: {source: d.jsonl, sorce: d.jsonl}
reward: {functions: [r.py:f]}
options: {clip_hihg: 0.2, gamma: 0.9}
"""
STAGES = """
model: m
steps: 1
lr: 1.0e-5
data: {source: d.jsonl}
stages:
  sft: {algorithm: sft, stepz: 2}
  policy: {model: "@sft", reward: {functions: [r.py:f]}, options: {clip_hihg: 0.2}}
"""
LR = "unknown key `lr`: verl's `actor_rollout_ref.actor.optim.lr` is `optimizer.learning_rate` here"
CLIP = "unknown key `options.clip_hihg`; did you mean `options.clip_high`?"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return tmp_path / "recipe.yaml"


def test_keys_and_options_that_there_are_not_are_told_together(written: Path) -> None:
    written.write_text(PLAIN)
    key, clip, gamma, typed = unknown_in(written, [("options.tmep", 1)])
    assert key == "unknown key `data.sorce`; did you mean `data.source`?"
    assert clip == CLIP
    assert gamma.startswith("unknown key `options.gamma`: it is one of ppo, safe_rlhf, and the flow `grpo` has none")
    assert typed.startswith("unknown key `options.tmep`")


def test_options_of_a_flow_of_the_users_are_its_own(written: Path) -> None:
    """Its file is imported when the run begins, and not to say what is wrong with other keys."""
    written.write_text(PLAIN)
    assert unknown_in(written, [("algorithm", "nowhere.py:flow")]) == [
        "unknown key `data.sorce`; did you mean `data.source`?"
    ]


def test_what_cannot_be_read_has_no_unknown_keys(written: Path) -> None:
    assert unknown_in(written, []) == []
    written.write_text("steps: [")
    assert unknown_in(written, []) == []
    assert unknown_in(None, [("stepz", 1)]) == ["unknown key `stepz`; did you mean `steps`?"]


def test_all_stages_are_told_at_once_and_what_is_wrong_in_several_once(written: Path) -> None:
    written.write_text(STAGES)
    with pytest.raises(ConfigError) as raised:
        load_stages(written)
    of_both, stepz, clip = raised.value.args
    assert of_both.startswith(f"stages `sft`, `policy`: {LR}")
    assert (stepz, clip) == ("stage `sft`: unknown key `stepz`; did you mean `steps`?", f"stage `policy`: {CLIP}")
    assert unknown_in(written, []) == [of_both, stepz, clip]


def test_a_key_that_is_missing_is_told_with_its_stage(written: Path) -> None:
    written.write_text("stages:\n  sft: {algorithm: sft, model: m, steps: 1}\n")
    with pytest.raises(ConfigError, match=r"^stage `sft`: key `data` is missing; set it in the recipe or with --data"):
        load_stages(written)


def test_an_error_in_a_stage_keeps_its_lines_and_those_of_the_users_code() -> None:
    with pytest.raises(ConfigError) as raised, in_stage("sft"):
        raise ConfigError("one", "two")
    assert raised.value.args == ("stage `sft`: one", "stage `sft`: two")
    with pytest.raises(DataError, match=r"^stage `sft`: a row$"), in_stage("sft"):
        raise DataError("a row")
    error = FlowError("it raises")
    error.frames = "flow.py, line 3"
    with pytest.raises(FlowError) as flow, in_stage("sft"):
        raise error
    assert flow.value.frames == "flow.py, line 3"
