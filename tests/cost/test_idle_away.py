"""What leaves a GPU where a plan by name says nothing of it: as little as makes everything fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.cost.call_memory import working_rows
from plait.cost.device_memory import memory_by_device
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.placed import Facts
from plait.cost.spent_memory import POOL_MARGIN, leaving_text, with_idle_away, with_pools_kept
from plait.cost.step_room import STEP
from plait.errors import ModelError
from plait.runtime import prepare
from plait.runtime.prediction import spending
from plait.runtime.prediction.spending import settled
from plait.runtime.prepare import outline
from plait.schedule.plan import POOL, Placement, Plan, PolicyChoice
from tests.cost.test_device_memory import facts_of, named

STATES = "actor.train (train), critic.train (train)"
REFERENCE = "ref.logprobs (score)"
EIGHT = SampleLengths(Lengths.fixed(8), Lengths.fixed(1))


def most(facts: Facts, plan: Plan) -> int:
    return max(device.expected_bytes for device in memory_by_device(replace(facts, plan=plan)))


@pytest.mark.parametrize("devices", [1, 4])
def test_as_little_leaves_as_makes_it_fit(devices: int) -> None:
    facts = facts_of(named("colocated", devices))
    assert with_idle_away(facts, most(facts, facts.plan)) == facts.plan
    states = with_idle_away(facts, most(facts, facts.plan) - 1)
    frozen = with_idle_away(facts, most(facts, states) - 1)
    idle = with_idle_away(facts, most(facts, frozen) - 1)
    assert set(leaving_text(states).split(", ")) == set(STATES.split(", "))
    assert set(leaving_text(frozen).split(", ")) == {*STATES.split(", "), REFERENCE}
    assert set(leaving_text(idle).split(", ")) == {*STATES.split(", "), REFERENCE, "critic.values (score)"}
    assert with_idle_away(facts, 0) == idle, "nothing makes it fit: the least"


def test_the_state_of_one_role_is_there_at_a_time() -> None:
    """SmolLM2-135M, PPO, one device, float32 of AdamW: masters' and moments' 16 bytes a parameter with the gradients'
    are there for the actor or the critic, never both."""
    facts = facts_of(named("colocated", 1))
    away = with_idle_away(facts, most(facts, facts.plan) - 1)
    rows = dict(memory_by_device(replace(facts, plan=away))[0].during)
    kept = dict(memory_by_device(facts)[0].rows)
    states = {role: kept[f"{role}: masters, moments and gradients"] for role in ("actor", "critic")}
    assert most(facts, facts.plan) - rows["actor.train"] >= states["critic"]
    assert rows["actor.generate"] <= most(facts, facts.plan) - sum(states.values())


def test_adapters_share_weights_that_are_always_in_use() -> None:
    facts = facts_of(named("colocated", 1), lora=8)
    assert with_idle_away(facts, 0) == facts.plan


GPU = {"device": "cuda", "sampling": {"kv_tokens": 1 << 15}}
ROOMY = 1e15


def test_pools_stay_where_there_is_room_beside_all_that_may_be_held() -> None:
    """With a tenth of the device to spare."""
    facts = facts_of(named("colocated", 1), **GPU)
    kept = with_pools_kept(facts, ROOMY)
    assert kept == replace(facts.plan, policies=(PolicyChoice(POOL),))
    (device,) = memory_by_device(replace(facts, plan=kept))
    room = device.most_bytes / (1 - POOL_MARGIN)
    assert with_pools_kept(facts, room + 1) == kept
    assert with_pools_kept(facts, room - 2) == facts.plan
    assert with_pools_kept(replace(facts, plan=kept), 0) == kept, "what a plan says is not taken back"


def test_a_pool_that_stays_is_there_at_every_moment_but_when_models_are_read() -> None:
    facts = facts_of(named("colocated", 1), **GPU)
    (actor,) = (model for model in facts.models if model.role == "actor")
    rows = working_rows(0, facts, actor)["actor", "decode"]
    assert STEP in dict(rows), "what a step takes for a moment does not stay"
    pool = sum(count for what, count in rows if what != STEP)
    kept = replace(facts, plan=with_pools_kept(facts, ROOMY))
    (before,), (after,) = memory_by_device(facts), memory_by_device(kept)
    assert after.rows == before.rows
    grown = {what: count - dict(before.during)[what] for what, count in after.during}
    there = ("reading models", "actor.generate")
    assert grown == {what: 0 if what in there else pool for what in grown}
    assert pool >= 2 * 30 * 3 * 64 * 2 * (1 << 15), "keys and values of 30 layers, 3 heads of 64, in bfloat16"


@pytest.mark.parametrize(
    ("how", "make_plan", "keys"),
    [
        ("a CPU takes it page by page", named("colocated", 1), {}),
        ("another engine has its own", named("colocated", 1), {"sampling": {"engine": "vllm"}, "device": "cuda"}),
    ],
)
def test_pools_go_where_keeping_them_gains_nothing(how, make_plan, keys) -> None:
    facts = facts_of(make_plan, "grpo", **keys)
    assert with_pools_kept(facts, ROOMY) == facts.plan, how


def test_pools_go_with_weights_that_leave_and_stay_anyway_where_a_gpu_does_nothing_else() -> None:
    def plan_of(ranks: tuple[int, ...], after: str):
        train = Placement("actor.train", "train", (0,))
        generate = Placement("actor.generate", "decode", ranks, dp=len(ranks), after=after)
        return lambda flow, planned: Plan("mine", 2, (train, Placement("ref.logprobs", "score", (0,)), generate))

    for ranks, after in (((0, 1), "offload"), ((1,), "keep")):
        facts = facts_of(plan_of(ranks, after), "grpo", **GPU)
        assert with_pools_kept(facts, ROOMY) == facts.plan
    facts = facts_of(plan_of((0, 1), "keep"), "grpo", **GPU)
    assert with_pools_kept(facts, ROOMY) != facts.plan


def test_plans_by_name_on_gpus_make_room(make_recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """On other devices, and in a plan file, everything is as it is said."""
    told: list[str] = []
    monkeypatch.setattr(spending, "device_bytes", lambda recipe, devices: 1)
    monkeypatch.setattr(spending, "say", lambda text, file: told.append(text))
    run = outline(make_recipe())
    plan = prepare.resolve_plan(run.recipe, run.flow, run.models, run.shapes)
    assert settled(run, plan, EIGHT) == plan
    on_gpu = replace(run, recipe=run.recipe.model_copy(update={"device": "cuda"}))
    assert {p.call: p.after for p in settled(on_gpu, plan, EIGHT).placements} == {
        "actor.generate": "keep",
        "ref.logprobs": "offload",
        "actor.train": "offload",
    }
    assert told == [
        "plan colocated: all of it does not fit on a GPU, so what idles is in host memory: "
        "ref.logprobs (score), actor.train (train)"
    ]
    of_file = replace(on_gpu, recipe=on_gpu.recipe.model_copy(update={"plan": "mine.json"}))
    assert settled(of_file, plan, EIGHT) == plan
    monkeypatch.setattr(spending, "device_bytes", lambda recipe, devices: ROOMY)
    roomy = settled(on_gpu, plan, EIGHT)
    assert roomy == replace(plan, policies=(PolicyChoice(POOL),))
    assert settled(on_gpu, roomy, EIGHT) == roomy == Plan.from_json(roomy.to_json()), "a run that is resumed, its ranks"
    assert settled(of_file, plan, EIGHT) == plan
    said = settled(run, roomy, EIGHT)
    assert said == roomy
    assert told[1:] == ["policy `pool` of the plan keeps nothing: it is for GPUs that generate by plait's own engine"]


def test_that_nothing_is_divided_is_said(make_recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(spending, "say", lambda text, file: told.append(text))
    keys = {"sampling.decode_groups": 3, "optimizer.shard_gradients": True}
    prepare.prepare(make_recipe(sequence_parallel=True, rebalance="auto", **keys))
    assert told == [
        "`sequence_parallel` divides nothing: no call of the plan trains with tp above 1",
        "`optimizer.shard_gradients` divides nothing: no call of the plan that has it trains with dp above 1",
        "`rebalance` moves nothing: no call of the plan generates in several instances",
        "`sampling.decode_groups` divides nothing: no call of the plan generates with pp above 1",
    ]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({}, None),
        ({"devices": 1}, "one instance generates"),
        (
            {"options": {"kl_coef": 0.1, "dynamic_sampling": True}},
            "samples are drawn in rounds (`resample`), and no model scores any before a round has ended",
        ),
        ({"fusion": "auto", "devices": 1}, None),
    ],
)
def test_that_stated_fusion_hides_nothing_is_said(make_recipe, monkeypatch: pytest.MonkeyPatch, keys, why) -> None:
    """Where steps decide (`auto`), a dry run says it."""
    told: list[str] = []
    monkeypatch.setattr(spending, "say", lambda text, file: told.append(text))
    prepare.prepare(make_recipe(**({"fusion": 0.5, "devices": 2, "plan": "colocated"} | keys)))
    assert told == ([f"`fusion` has nothing to hide: {why}"] if why else [])


def test_layers_to_adapt_that_a_model_has_not_are_refused_before_it_is_loaded(make_recipe) -> None:
    with pytest.raises(ModelError, match=r"^lora\.target_modules: expected all-linear, or .*found q_prj$"):
        prepare.prepare(make_recipe(**{"lora.rank": 2, "lora.target_modules": ["q_prj"]}))
