"""Which models' experts can be balanced, or replayed: the others are refused before any work."""

from __future__ import annotations

import pytest

from plait.dataflow import Dataflow
from plait.errors import ConfigError
from plait.models.shape import ModelShape
from plait.recipes.algorithm import load_flow, trace_algorithm
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import MODEL_ROLES, REWARD_ROLES, RoleModel
from plait.recipes.router_checks import check_balanced, check_replayed, replays_experts
from tests.models.tiny import FAMILIES, RECURRENT, tiny_config

SHAPES = {name: ModelShape.from_config(tiny_config(name).to_dict()) for name in (*FAMILIES, *RECURRENT)}
ACTOR = RoleModel("actor", "qwen3_moe", scalar=False, trained=True, key="model")


def recipe(**sections: object) -> Recipe:
    return Recipe.model_validate({"model": "it", "data": {"source": "it.jsonl"}, **sections})


def test_families_that_have_such_a_loss_in_transformers():
    balanced = {name for name, shape in SHAPES.items() if shape.balances}
    assert balanced == {"mixtral", "qwen3_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe_text", "granitemoehybrid"}


def test_dense_layers_alone_have_no_routers():
    config = tiny_config("qwen3_moe", mlp_only_layers=[0, 1]).to_dict()
    assert not ModelShape.from_config(config).balances


@pytest.mark.parametrize(
    ("model", "role", "why"),
    [
        (
            "llama",
            "actor",
            r"^`optimizer\.router_aux_loss_coef` is 0\.001, but `llama`, .* is no mixture",
        ),
        ("deepseek_v3", "actor", r"^`optimizer\.router_aux_loss_coef` .* family for which Transformers has no loss"),
        ("llama", "critic", r"^`critic\.optimizer\.router_aux_loss_coef` is 0\.001, .*or `critic\.model` to another$"),
    ],
)
def test_others_are_refused_by_the_key(model, role, why):
    own = {"optimizer": {"router_aux_loss_coef": 0.001}}
    of_critic = RoleModel("critic", model, scalar=True, trained=True, key="critic.model")
    models = [ACTOR, of_critic] if role == "critic" else [RoleModel("actor", model, False, True, "model")]
    with pytest.raises(ConfigError, match=why):
        check_balanced(recipe(**({"critic": own} if role == "critic" else own)), models, SHAPES)


def test_roles_that_are_not_trained_may_be_any_model():
    models = [ACTOR, RoleModel("ref", "llama", False, False, "reference.model")]
    check_balanced(recipe(optimizer={"router_aux_loss_coef": 0.001}), models, SHAPES)
    check_balanced(recipe(), [RoleModel("actor", "llama", False, True, "model")], SHAPES)


REPLAYED = {"sampling": {"router_replay": True}}


def flow_of(name: str) -> Dataflow:
    return trace_algorithm(load_flow(name), {}, (*MODEL_ROLES, *REWARD_ROLES))


def test_who_draws_replays():
    flow, replayed = flow_of("ppo"), recipe(**REPLAYED)
    assert [role for role in flow.roles if replays_experts(role, flow, replayed)] == ["actor"]
    assert not replays_experts("actor", flow, recipe())
    check_replayed(replayed, flow, [ACTOR, RoleModel("ref", "llama", False, False, "reference.model")], SHAPES)
    check_replayed(recipe(), flow, [RoleModel("actor", "llama", False, True, "model")], SHAPES)


def test_flows_and_models_without_experts_to_replay():
    with pytest.raises(ConfigError, match=r"^`sampling\.router_replay` is true, but no role draws samples in"):
        check_replayed(recipe(**REPLAYED), flow_of("dpo"), [ACTOR], SHAPES)
    dense = RoleModel("actor", "llama", scalar=False, trained=True, key="model")
    with pytest.raises(ConfigError, match=r"`llama`, which the role `actor` begins as, is no mixture of experts"):
        check_replayed(recipe(**REPLAYED), flow_of("grpo"), [dense], SHAPES)
