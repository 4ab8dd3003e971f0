"""Which models can read a run's tokens."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from plait.errors import ConfigError, ModelError
from plait.models.shape import ModelShape
from plait.recipes.algorithm import load_flow, trace_algorithm
from plait.recipes.role_models import MODEL_ROLES, REWARD_ROLES, RoleModel
from plait.runtime.inputs.tokenizers import check_reach, check_roles

OURS = ModelShape(2, 16, 32, 4, 2, 4, vocabulary=64, tied=False, max_positions=128, attention_parameters=768)
FLOW = trace_algorithm(load_flow("safe_rlhf"), {"ptx_coef": 1.0}, (*MODEL_ROLES, *REWARD_ROLES))
LONGEST = {"actor.generate": 16, "examples": 100}
TWO = (
    RoleModel("actor", "ours", scalar=False, trained=True, key="model"),
    RoleModel("critic", "theirs", scalar=True, trained=True, key="critic.model"),
)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"vocabulary": 64, "max_positions": 16}, None),
        (
            {"vocabulary": 63},
            "whose vocabulary has 63 tokens, but `ours`, whose samples the critic reads, draws",
        ),
        ({"max_positions": 15}, "whose positions end at 15, but samples may have 16 tokens"),
    ],
    ids=str,
)
def test_a_critic_reads_responses_with_the_tokens_that_the_policy_has(theirs: dict[str, Any], said: str | None) -> None:
    """The tokenizer has one more, as that of gemma 3 for images. Examples of 100 tokens are for the policy alone."""
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "<image>": 64})
    shapes = {"ours": OURS, "theirs": replace(OURS, **theirs)}
    refused = pytest.raises(ConfigError, match=f"^`critic.model` is `theirs`, {said}")
    with refused if said else nullcontext():
        check_reach(tokenizer, "ours", FLOW, LONGEST, TWO, shapes)


PADDED = {"ours": replace(OURS, vocabulary=96), "theirs": replace(OURS, vocabulary=80)}
"""Of one tokenizer with 70 tokens, as Qwen2.5's models have 151,936 or 152,064 rows for its 151,665."""
SEVENTY = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 69})


def reads(algorithm: str, role: str, key: str, shapes: dict[str, ModelShape]) -> None:
    flow = trace_algorithm(load_flow(algorithm), {}, (*MODEL_ROLES, *REWARD_ROLES))
    models = (TWO[0], RoleModel(role, "theirs", scalar=role == "critic", trained=role == "critic", key=key))
    longest = {node.call: 16 for node in flow.nodes}
    check_reach(SEVENTY, "ours", flow, longest, models, shapes)


def test_a_role_has_a_row_for_each_token_that_may_be_drawn() -> None:
    """Rows without a text are drawn, too, if seldom: the run would end at the first such sample, and again when it is
    resumed. The other way round it is no fault: a reference's log-probs are over all of its rows."""
    for algorithm, role, key in (("ppo", "critic", "critic.model"), ("distill", "ref", "reference.model")):
        said = (
            f"^`{key}` is `theirs`, whose vocabulary has 80 tokens, but `ours`, whose samples the {role} reads, draws "
            rf"from 96, .* give another `{key}`, or add rows to it \(Transformers' `resize_token_embeddings\(96\)`\)$"
        )
        with pytest.raises(ConfigError, match=said):
            reads(algorithm, role, key, PADDED)
        reads(algorithm, role, key, {"ours": PADDED["theirs"], "theirs": PADDED["ours"]})


def test_given_texts_have_only_tokens_of_the_tokenizer() -> None:
    reads("dpo", "ref", "reference.model", PADDED)
    with pytest.raises(ConfigError, match="whose vocabulary has 69 tokens, but that of the run has 70"):
        reads("dpo", "ref", "reference.model", PADDED | {"theirs": replace(OURS, vocabulary=69)})


def test_a_role_that_is_a_shape_alone_is_refused_by_its_own_key() -> None:
    """Beside a policy with tokens: whether it has the same ones is not known."""
    judge = RoleModel("judge", "qwen2.5-0.5b", scalar=False, trained=False, key="judge.model")
    said = r"^judge\.model: 'qwen2\.5-0\.5b' is known by .* alone, .* where `model` is such a one, too, .* set `judge"
    with pytest.raises(ModelError, match=said):
        check_roles(SimpleNamespace(get_vocab=dict), "ours", [judge])
