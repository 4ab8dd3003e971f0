"""Where the defaults of TRL 1.16 differ from ours: the table of docs/algorithms.md, read off both. Slow to import."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.algorithms.distill import DistillOptions
from plait.algorithms.dpo import DPOOptions
from plait.algorithms.grpo import GRPOOptions
from plait.algorithms.kto import KTOOptions
from plait.algorithms.rloo import RLOOOptions
from plait.data.formats import Row
from plait.data.prompts import PromptEncoder
from plait.data.settings import DataSettings
from plait.generation.settings import SamplingSettings
from plait.recipes.recipe import Recipe
from plait.training.settings import OptimizerSettings
from tests.models.tiny import tiny_tokenizer

trl = pytest.importorskip("trl")

AGGREGATIONS = {"dapo": "token-mean", "grpo": "seq-mean-token-mean"}
PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


def default(config: type[Any], name: str) -> Any:
    [field] = [field for field in dataclasses.fields(config) if field.name == name]
    return field.default


def row(begin: str) -> list[str]:
    """Cells of the table of defaults: what, ours, theirs, their name."""
    table = PAGE[PAGE.index("| | plait's default |") : PAGE.index("Toy problems have a known optimum")]
    [line] = [line for line in table.splitlines() if line.startswith(f"| {begin} |")]
    return [cell.strip().strip("`") for cell in line.strip("|").split("|")]


def test_the_aggregation_of_grpo():
    _, ours, theirs, name = row("`grpo`: `aggregation`")
    assert ours.split("`")[0] == GRPOOptions().aggregation
    assert name == f"loss_type: {default(trl.GRPOConfig, 'loss_type')}"
    assert theirs == AGGREGATIONS[default(trl.GRPOConfig, "loss_type")]


@pytest.mark.parametrize(
    ("begin", "ours", "config"),
    [
        ("`grpo`: `weigh_kl_by_ratio`", GRPOOptions().weigh_kl_by_ratio, "GRPOConfig"),
        ("`rloo`: `kl_coef`", RLOOOptions().kl_coef, "RLOOConfig"),
        ("`reward_model`: `optimizer.learning_rate`", OptimizerSettings().learning_rate, "RewardConfig"),
        ("`sft`: `optimizer.learning_rate`", OptimizerSettings().learning_rate, "SFTConfig"),
        ("`optimizer.schedule`", OptimizerSettings().schedule.value, "GRPOConfig"),
        ("`sampling.max_response_tokens`", SamplingSettings().max_response_tokens, "GRPOConfig"),
        ("`rloo`: `samples_per_prompt`", Recipe.model_fields["samples_per_prompt"].default, "RLOOConfig"),
    ],
)
def test_a_default_is_what_the_page_says(begin, ours, config):
    _, stated, theirs, name = row(begin)
    value = default(getattr(trl, config), name)
    assert value != ours
    assert [as_value(stated), as_value(theirs)] == [ours, value]


def as_value(cell: str) -> Any:
    first = cell.split(" (")[0]
    try:
        return {"true": True, "false": False}.get(first) if first in ("true", "false") else float(first)
    except ValueError:
        return first


def test_the_defaults_of_gkd(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDConfig

    _, ours, theirs, name = row("`distill`: `beta`")
    assert float(ours) == DistillOptions().beta
    assert as_value(theirs) == default(GKDConfig, name)
    assert f"at its `temperature` ({default(GKDConfig, 'temperature')} unless set)" in PAGE


@pytest.mark.parametrize("trainer", ["GRPOTrainer", "RLOOTrainer", "DistillationTrainer"])
def test_prompts_to_answer(trainer):
    """As docs/data.md has it: TRL sends texts raw, and opens an answer behind a last message of the assistant."""
    tokenizer = tiny_tokenizer()
    given = SimpleNamespace(processing_class=tokenizer, tools=None, chat_template=None, chat_template_kwargs={})
    given._is_vlm, given.environment_factories = False, None

    def theirs(prompt: Any) -> str:
        return tokenizer.decode(getattr(trl, trainer)._tokenize_prompts(given, [prompt])[0][0])

    def ours(prompt: Any, **keys: Any) -> str:
        settings = DataSettings(source="x.jsonl", **keys)
        encoder = PromptEncoder(tokenizer, settings, conversational=not isinstance(prompt, str))
        return encoder.render(Row({"prompt": prompt}, "x.jsonl:1"))

    asked = [{"role": "user", "content": "hi"}]
    begun = [*asked, {"role": "assistant", "content": "so"}]
    _, default, their_own, _ = row("`data.chat_template`, for prompts that are texts")
    assert default.startswith("auto`: a user message")
    assert their_own == "false"
    assert theirs("hi") == ours("hi", chat_template=False) == "hi"
    assert theirs(asked) == ours(asked) == ours("hi")
    assert theirs(begun) == ours(begun) + "<|im_end|>\n<|im_start|>assistant\n"


def test_the_length_of_a_run():
    _, ours, theirs, name = row("the length of a run")
    assert ours == f"steps: {Recipe.model_fields['steps'].default}"
    assert theirs == f"epochs: {default(trl.GRPOConfig, name):g}"


def test_what_else_the_page_says_of_trl():
    assert default(trl.GRPOConfig, "disable_dropout") is default(trl.RLOOConfig, "disable_dropout") is False
    assert default(trl.DPOConfig, "label_smoothing") == DPOOptions().label_smoothing == 0
    weights = ("beta", "desirable_weight", "undesirable_weight", "loss_type")
    assert [default(trl.KTOConfig, name) for name in weights] == [getattr(KTOOptions(), name) for name in weights]
    assert default(trl.DistillationConfig, "beta") == DistillOptions().beta == 1
    assert default(trl.GRPOConfig, "beta") == GRPOOptions().kl_coef == 0
    assert default(trl.GRPOConfig, "epsilon") == GRPOOptions().clip_low == GRPOOptions().clip_high
    assert default(trl.GRPOConfig, "learning_rate") == OptimizerSettings().learning_rate
