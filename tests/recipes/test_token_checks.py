"""Whose likeliest tokens are asked for: a teacher that is the policy itself teaches nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from plait.errors import ConfigError, FlowError
from plait.recipes.flow_checks import checked_flow
from plait.recipes.recipe_file import load_recipe
from plait.recipes.stages import load_stages


@pytest.mark.parametrize(
    ("model", "teacher", "refused"),
    [
        ("m", "@expert", ""),
        ("@expert", "m", ""),
        ("@expert", "@expert", "@expert"),
        ("m", "m", "m"),
        ("qwen3-4b", "qwen3-4b", ""),
    ],
)
def test_a_teacher_that_is_another_model_may_look_alike(tmp_path: Path, model: str, teacher: str, refused: str) -> None:
    """In place of what an earlier stage trains stands the model that it begins with, which may be the student's; and a
    shape stands for any model."""
    distill = {"algorithm": "distill", "model": model, "reference": {"model": teacher}, "options": {"on_policy": False}}
    stages = {"expert": {"algorithm": "sft"}, "student": distill}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"model": "m", "data": {"source": "d"}, "stages": stages}))
    of_stages = load_stages(tmp_path / "recipe.yaml")
    recipe, to_come = of_stages.foreseen("student"), of_stages.to_come("student")
    if refused:
        with pytest.raises(ConfigError, match=f"is the same, so that it would be `{refused}` itself"):
            checked_flow(recipe, to_come=to_come)
    else:
        assert checked_flow(recipe, to_come=to_come).name == "distill"
    assert checked_flow(recipe, to_come=to_come, trains=False).name == "distill", "what is only measured learns nothing"


def loss(batch, teacher_logprobs):
    return batch


def learner(prompts, actor, ref):
    samples = actor.generate(prompts)
    ref.teaches()
    actor.train(samples, loss=loss, teacher_logprobs=ref.logprobs(samples))


def of_the_critic(prompts, actor, critic):
    samples = actor.generate(prompts)
    critic.teaches()
    actor.train(samples, loss=loss, teacher_logprobs=critic.values(samples))


def test_a_flow_in_a_file_says_who_teaches() -> None:
    """The policy would learn from itself, and nothing said so."""
    keys = {"model": "m", "data.source": "d", "algorithm": f"{__file__}:learner"}
    with pytest.raises(ConfigError, match=r"^the flow `learner` learns from a teacher, but `reference\.model` is not"):
        checked_flow(load_recipe(None, [*keys.items()]))
    checked_flow(load_recipe(None, [*keys.items(), ("reference.model", "t")]))
    with pytest.raises(FlowError, match="flow `of_the_critic`: role `critic` cannot teach; `ref` can"):
        checked_flow(load_recipe(None, [*keys.items(), ("algorithm", f"{__file__}:of_the_critic")]))
