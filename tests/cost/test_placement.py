"""A recipe's plan before anything is loaded: resolved, checked against models and devices, printed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.cli.dry_run import dry_run
from plait.cost import placement
from plait.cost.device_memory import memory_by_device
from plait.cost.estimate import model_shape
from plait.cost.generation_memory import packed_bytes
from plait.cost.held_parameters import parameter_rows
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.model_parameters import parameters_of
from plait.cost.placed import Facts, Placed
from plait.cost.placement import resolve_plan
from plait.cost.working_memory import PROCESS, PROCESS_BYTES
from plait.errors import ConfigError, DataError, LayoutError, UserError
from plait.generation.transfer import holdings
from plait.layout.caches import CacheShape, LayerCache
from plait.layout.mesh import Layout, Mesh, Parallelism
from plait.layout.params import Parameters
from plait.layout.shards import shard, zero_range
from plait.models.language_loading import load_model
from plait.models.logits_room import HEAD_CHUNK_ROWS
from plait.models.scalar_loading import load_scalar
from plait.recipes.algorithm import load_flow, trace_algorithm
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import MODEL_ROLES, REWARD_ROLES, RoleModel, role_models
from plait.runtime.api import run
from plait.schedule.placements import placements_of
from plait.schedule.plan import Placement, Plan
from plait.schedule.timeline import Span, Timeline
from tests.cost.test_device_memory import row_of

ROOT = Path(__file__).parents[2]
PPO: dict[str, Any] = {"algorithm": "ppo", "options": {}}
LENGTHS = SampleLengths(Lengths.fixed(20), Lengths.fixed(1))


def facts_of(recipe: Recipe):
    flow = trace_algorithm(load_flow(recipe.algorithm), recipe.options, (*MODEL_ROLES, *REWARD_ROLES))
    models = role_models(flow, recipe)
    return flow, models, {one.name: model_shape(one.name) for one in models}


def resolved(recipe: Recipe) -> Plan:
    return resolve_plan(recipe, *facts_of(recipe))


@pytest.fixture
def write_plan(tmp_path: Path) -> Callable[..., str]:
    def write(*placements: dict[str, Any], num_ranks: int = 2, **keys: Any) -> str:
        path = tmp_path / "mine.json"
        record = {"format": "plait-plan", "version": 1, "name": "mine", "num_ranks": num_ranks} | keys
        path.write_text(json.dumps(record | {"placements": list(placements)}))
        return str(path)

    return write


def test_what_a_plan_file_says_was_predicted_of_it_is_not_taken_over(make_recipe, write_plan) -> None:
    """It may be for another batch or machine, or the file may have been edited since: a run predicts for itself."""
    predicted = json.loads(Timeline((Span("actor.train", "TRAIN", 0, 0.0, 0.5),)).to_json())
    path = write_plan({"call": "actor.train", "mode": "train", "ranks": [0, 1], "dp": 2}, predicted=predicted)
    assert Plan.load(path).predicted is not None
    assert resolved(make_recipe(plan=path)).predicted is None


def test_without_a_word_a_run_is_on_one_device(make_recipe) -> None:
    plan = resolved(make_recipe())
    assert (plan.name, plan.num_ranks) == ("colocated", 1)
    assert [(p.call, p.mode, p.ranks) for p in plan.placements] == [
        ("actor.generate", "decode", (0,)),
        ("ref.logprobs", "score", (0,)),
        ("actor.train", "train", (0,)),
    ]


def test_named_plans_for_the_devices_at_hand(make_recipe) -> None:
    plan = resolved(make_recipe(**PPO, plan="split", devices=4))
    assert placements_of(plan, "actor").ranks == placements_of(plan, "ref").ranks == (0, 1)
    assert placements_of(plan, "critic").train == Layout.on((2, 3), dp=2)
    with pytest.raises(ConfigError, match="standalone needs at least 3 devices for the flow `ppo`, found 1"):
        resolved(make_recipe(**PPO, plan="standalone"))
    with pytest.raises(ConfigError, match="found `spilt`; did you mean `split`"):
        resolved(make_recipe(plan="spilt"))


def test_a_plan_file_that_cannot_be_read_is_no_unknown_name(
    make_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "colocate").mkdir()
    (tmp_path / "latin.json").write_bytes(b'{"name": "\xff"}')
    (tmp_path / "loop.json").symlink_to("loop.json")
    (tmp_path / "file").touch()
    expected = "`plan`: expected auto, colocated, split, standalone or a plan file, found "
    for name, why in {
        "none.json": f"{expected}`none.json`, which does not exist",
        "plans/split": f"{expected}`plans/split`, which does not exist",
        "colocate": f"{expected}`colocate`, which is a folder, not a file",
        "loop.json": f"{expected}`loop.json`, which cannot be read (Too many levels of symbolic links)",
        "file/plan.json": f"{expected}`file/plan.json`, which cannot be read (Not a directory)",
        "latin.json": "latin.json: expected a plan file that can be read: 'utf-8' codec can't decode byte 0xff",
    }.items():
        with pytest.raises(UserError, match=re.escape(why)):
            resolved(make_recipe(plan=name))


def test_a_plan_for_a_flow_of_ones_own(make_recipe) -> None:
    flow = str(ROOT / "examples" / "my_flow.py") + ":best_of_group"
    plan = resolved(make_recipe(algorithm=flow, options={}, plan="split", devices=2))
    assert placements_of(plan, "actor").train is not None
    assert {rank for p in plan.placements for rank in p.ranks} == {0, 1}


def test_a_schedule_with_several_copies_of_a_role_does_not_divide_its_gradients(make_recipe, write_plan) -> None:
    """A critic whole on each device, beside an actor in two stages: its copies are at other places of one order."""
    together = {"mode": "train", "ranks": [0, 1], "schedule": "fused"}
    path = write_plan({"call": "actor.train", "pp": 2, **together}, {"call": "critic.train", "dp": 2, **together})
    of_actor, of_critic = (
        make_recipe(algorithm="ppo", options={}, plan=path, **{f"{section}optimizer.shard_gradients": True})
        for section in ("", "critic.")
    )
    assert placements_of(resolved(of_actor), "actor").train is not None
    with pytest.raises(
        ConfigError, match=r"critic.train has 2 copies in the schedule `fused`.* as many stages, or set"
    ):
        resolved(of_critic)


def test_models_that_leave_no_room_are_cut(make_recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """tp 2 on four devices: the least that leaves weights and optimizer state 60 % of a device."""
    recipe = make_recipe(plan="colocated", devices=4)
    flow, models, shapes = facts_of(recipe)
    parameters = parameters_of(models)
    whole = resolve_plan(recipe, flow, models, shapes)
    assert {p.tp for p in whole.placements} == {1}
    held = [
        sum(count for _, count in parameter_rows(r, Placed(recipe, models, shapes, parameters, whole)))
        for r in range(4)
    ]
    monkeypatch.setattr(placement, "device_bytes", lambda recipe, devices: (min(held) - 1) / 0.6)
    cut = resolve_plan(recipe, flow, models, shapes)
    assert {(p.dp, p.tp) for p in cut.placements} == {(2, 2)}
    monkeypatch.setattr(placement, "device_bytes", lambda recipe, devices: 1)  # nothing helps
    assert resolve_plan(recipe, flow, models, shapes) == whole


def test_a_file_is_completed(make_recipe, write_plan) -> None:
    recipe = make_recipe(plan=write_plan({"call": "actor.train", "mode": "train", "ranks": [0, 1], "pp": 2}))
    plan = resolved(recipe)
    assert placements_of(plan, "actor").generate == (Layout(Mesh((0, 1)), Parallelism(pp=2, stages=(1, 1))),)
    assert placements_of(plan, "ref").score == Layout.on((0, 1), dp=2)


@pytest.mark.parametrize(
    ("error", "keys", "change", "message"),
    [
        (LayoutError, {}, {"tp": 8, "ranks": [*range(8)]}, "actor train: tp: expected at most 4, the query heads"),
        (LayoutError, {}, {"pp": 4, "ranks": [*range(4)]}, "actor train: pp: expected at most 2, the layers"),
        (LayoutError, {}, {"pp": 2, "stages": [2, 1]}, "stages: expected 2 layers in all, found 2 . 1 = 3"),
        (ConfigError, {}, {"call": "actor.tain", "dp": 2}, r"placements\[0\].call: .*mean `actor.train`\?\)"),
        (ConfigError, {"devices": 3}, {"dp": 2}, "`devices` is 3, but `num_ranks` of the plan"),
        (DataError, {}, {"dp": 2, "rank": 3}, r"placements\[0\]: unknown key 'rank'; did you mean 'ranks'"),
        (DataError, {}, {"dp": "2"}, r"placements\[0\]: expected a whole number for 'dp', found '2'"),
        (DataError, {}, {"dp": 3}, "dp x tp x pp = 3 x 1 x 1 ranks, found 2"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_loads(make_recipe, write_plan, error, keys, change, message) -> None:
    train = {"call": "actor.train", "mode": "train", "ranks": [0, 1]} | change
    path = write_plan(train, num_ranks=len(train["ranks"]))
    with pytest.raises(error, match=message):
        resolved(make_recipe(plan=path, **keys))


def test_policies_that_no_run_follows(make_recipe, write_plan) -> None:
    with pytest.raises(ConfigError, match=r"`policies`: expected `fusion`, `pool`, `shares`, or none, found `migr"):
        resolved(make_recipe(plan=write_plan(policies=[{"name": "migration", "settings": {}}])))
    with pytest.raises(ConfigError, match=r"settings of `fusion`: expected none, or all of step_s, .*, found share"):
        resolved(make_recipe(plan=write_plan(policies=[{"name": "fusion", "settings": {"share": 1}}])))
    assert resolved(make_recipe(plan=write_plan(policies=[{"name": "fusion", "settings": {}}]))).policies


def test_the_only_weights_are_not_dropped(make_recipe, write_plan) -> None:
    """Those of one device, or where a copy would be the home's own part; nor is what lies under adapters."""
    generate = {"call": "actor.generate", "mode": "decode", "ranks": [0], "after": "drop"}
    with pytest.raises(ConfigError, match=r"actor.generate decode: `after` drop would lose the only weights.* offload"):
        resolved(make_recipe(plan=write_plan(generate, num_ranks=1)))
    train = {"call": "actor.train", "mode": "train", "ranks": [0, 1], "dp": 2}
    with pytest.raises(ConfigError, match=r"actor.generate decode: `after` drop would lose the only weights"):
        resolved(make_recipe(plan=write_plan(train, generate)))
    elsewhere = [train | {"ranks": [1], "dp": 1}, generate]
    (decode,) = resolved(make_recipe(plan=write_plan(*elsewhere))).placements_of("actor.generate", "decode")
    assert decode.after == "drop"
    with pytest.raises(ConfigError, match=r"drop cannot bring back the weights under the adapters .* take offload"):
        resolved(make_recipe(plan=write_plan(*elsewhere), **{"lora.rank": 2}))
    with pytest.raises(
        ConfigError, match=r"actor.generate prefill: `after`: prefill and decode have one copy; set `after: offload` in"
    ):
        resolved(make_recipe(plan=write_plan(generate | {"mode": "prefill", "after": "offload"}, num_ranks=1)))


APART = [{"call": "actor.generate", "mode": mode, "ranks": [rank]} for rank, mode in enumerate(("prefill", "decode"))]
"""Prompts on a device of their own."""


def test_prompts_that_are_computed_elsewhere_do_not_halt_for_new_weights(make_recipe, write_plan) -> None:
    plan = write_plan(*APART)
    assert resolved(make_recipe(plan=plan, max_staleness=1)).placements_of("actor.generate", "prefill")
    with pytest.raises(
        ConfigError,
        match=r"`partial_rollout` is keep: prompts that are being sent .* set `partial_rollout` to off",
    ):
        resolved(make_recipe(plan=plan, max_staleness=1, partial_rollout="keep"))


def test_a_device_that_computes_prompts_for_others_has_room_for_prompts(make_recipe, write_plan) -> None:
    """12 prompts of 20 tokens at most; that which draws has all samples."""
    recipe = make_recipe(plan=write_plan(*APART))
    flow, models, shapes = facts_of(recipe)
    facts = Facts(recipe, models, shapes, parameters_of(models), resolved(recipe), flow, LENGTHS)
    computes, draws = (dict(device.rows) for device in memory_by_device(facts))
    samples, prompts = recipe.prompts_per_step * recipe.samples_per_prompt, recipe.prompts_per_step
    context = 20 + recipe.sampling.max_response_tokens
    of_prompts = row_of(f"actor: KV cache ({prompts} prompts x 20 tokens", computes)
    of_samples = row_of(f"actor: KV cache ({samples} samples x {context} tokens", draws)
    assert of_samples * prompts * 20 == of_prompts * samples * context
    calls = dict(memory_by_device(facts)[0].during)
    assert "actor.generate" in calls


@pytest.mark.parametrize(("most", "given", "taken"), [(4096, 40, 60), (24, 24, 48), (8, 20, 40)])
def test_prompts_on_their_way_have_room_beside_the_pools(
    make_recipe, write_plan, most: int, given: int, taken: int
) -> None:
    """Two instances compute three prompts of 20 tokens at most for one that draws, which has a load of each at a time:
    as many tokens as a step computes, or one prompt, and no more than there are. That is the buffer of a move on either
    side."""
    places = [("prefill", 0), ("prefill", 1), ("decode", 2)]
    plan = [{"call": "actor.generate", "mode": mode, "ranks": [rank]} for mode, rank in places]
    recipe = make_recipe(plan=write_plan(*plan, num_ranks=3), **{"sampling.max_prefill_tokens": most})
    flow, models, shapes = facts_of(recipe)
    facts = Facts(recipe, models, shapes, parameters_of(models), resolved(recipe), flow, LENGTHS)
    shape = shapes[models[0].name]
    layers = tuple(LayerCache(layer, shape.kv_heads, shape.head_dim, shape.head_dim) for layer in range(shape.layers))
    computes, draws = (dict(device.rows) for device in memory_by_device(facts))
    for rows, count in ((computes, given), (draws, taken)):
        held = holdings(CacheShape(shape.layers, shape.heads, layers), [count], Layout.on(range(1)), recipe.dtype)
        buffer_bytes = sum(held.buffers[0].values()) * held.item_bytes
        assert row_of(f"actor: prompts on their way ({count} tokens)", rows) == buffer_bytes > 0


def test_where_prompts_are_computed_with_their_samples_none_is_on_its_way(make_recipe, write_plan) -> None:
    recipe = make_recipe(plan=write_plan({"call": "actor.generate", "mode": "decode", "ranks": [0]}, num_ranks=1))
    flow, models, shapes = facts_of(recipe)
    facts = Facts(recipe, models, shapes, parameters_of(models), resolved(recipe), flow, LENGTHS)
    assert not [what for device in memory_by_device(facts) for what, _ in device.rows if "on their way" in what]


def test_parameters_are_known_before_they_are_read(tiny_folder: Path) -> None:
    """From the configuration alone: those that the loaded models have."""
    name = str(tiny_folder)
    speaker, judge = RoleModel("actor", name, False, True, "model"), RoleModel("critic", name, True, True, "model")
    found = parameters_of([speaker, judge])
    for role, model in (("actor", load_model(name)), ("critic", load_scalar(name))):
        config = model.module.config
        assert found[role] == Parameters.of(model.layout, config.num_attention_heads, config.num_key_value_heads)


def test_the_memory_of_each_device(make_recipe, write_plan) -> None:
    """GRPO in float32: the actor trains in two stages on 0 and 1; all else is on 2."""
    path = write_plan(
        {"call": "actor.generate", "mode": "decode", "ranks": [2]},
        {"call": "actor.train", "mode": "train", "ranks": [0, 1], "pp": 2},
        {"call": "ref.logprobs", "mode": "score", "ranks": [2]},
        num_ranks=3,
    )
    recipe = make_recipe(plan=path)
    flow, models, shapes = facts_of(recipe)
    parameters, plan = parameters_of(models), resolve_plan(recipe, flow, models, shapes)
    columns = memory_by_device(Facts(recipe, models, shapes, parameters, plan, flow, LENGTHS))
    table = {rank: dict(one.rows) for one in columns for rank in one.ranks}
    assert all(one.expected_bytes == max(dict(one.during).values()) <= sum(dict(one.rows).values()) for one in columns)
    assert all(one.most_bytes == one.expected_bytes + sum(dict(one.slack).values()) for one in columns)
    assert all(dict(one.slack)["buckets of a move"] == 2 * (64 << 20) for one in columns)
    train = Layout.on((0, 1), pp=2)
    for rank in (0, 1):
        count = shard(parameters["actor"], train.parallelism, 0, rank).num_elements
        assert table[rank][PROCESS] == PROCESS_BYTES
        assert table[rank]["actor: weights (float32)"] == 4 * count
        once = shard(parameters["actor"], train.parallelism, 0, rank, once=True).num_elements  # the embedding is tied
        assert table[rank]["actor: masters, moments and gradients"] == 8 * once + 4 * count
        assert not [what for what in table[rank] if "KV cache" in what]
    assert "logits of one chunk" not in table[0]
    shape = shapes[recipe.model]
    assert table[1]["logits of one chunk"] == HEAD_CHUNK_ROWS * shape.vocabulary * (4 + 8)
    assert table[0]["activations"] == pytest.approx(2 * table[1]["activations"], abs=2)  # two micro-batches in flight
    whole = shard(parameters["actor"], Layout.on((2,)).parallelism, 0, 0).num_elements
    assert table[2]["actor: weights (float32)"] == table[2]["ref: weights (float32)"] == 4 * whole
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * 4
    assert row_of("actor: KV cache (12 samples x 26 tokens", table[2]) == 12 * (20 + 6) * per_token


NO_DRAFTS_KEYS = {"sampling.speculation": "off"}


def test_memory_that_leaves_is_counted_while_it_is_there(make_recipe, write_plan) -> None:
    """bfloat16, one device: state and reference are away while the actor generates. Two: a copy to generate with."""
    offload = {"ranks": [0], "after": "offload"}
    path = write_plan(
        {"call": "actor.train", "mode": "train", **offload},
        {"call": "ref.logprobs", "mode": "score", **offload},
        {"call": "actor.generate", "mode": "decode", "ranks": [0]},
        num_ranks=1,
    )
    recipe = make_recipe(plan=path, dtype="bfloat16", **NO_DRAFTS_KEYS)
    flow, models, shapes = facts_of(recipe)
    parameters, plan = parameters_of(models), resolve_plan(recipe, flow, models, shapes)
    (alone,) = memory_by_device(Facts(recipe, models, shapes, parameters, plan, flow, LENGTHS))
    shape, count = shapes[recipe.model], shard(parameters["actor"], Layout.on((0,)).parallelism, 0, 0).num_elements
    rows, during = dict(alone.rows), dict(alone.during)
    assert rows["actor: weights (bfloat16)"] == 2 * count, "generation keeps them"
    assert rows["ref: weights (bfloat16), away when idle"] == 2 * count
    assert rows["actor: masters, moments and gradients, away when idle"] == 16 * count
    cache, packed = row_of("actor: KV cache", rows), packed_bytes(shape, "bfloat16")
    others = sum(rows.get(what, 0) for what in ("activations", "logits of one chunk", "gradient of the head"))
    beyond = rows.get("actor: weights packed for decoding, beyond other temporary memory", 0)
    assert beyond == max(0, packed - others + rows["activations"])
    assert during["actor.generate"] == PROCESS_BYTES + 2 * count + cache + packed + rows["activations"]
    assert during["actor.train"] == PROCESS_BYTES + 18 * count + others
    assert during["ref.logprobs"] < PROCESS_BYTES + 4 * count + others
    assert during["reading models"] == PROCESS_BYTES + 20 * count
    assert alone.expected_bytes == max(during.values()) < sum(rows.values())

    path = write_plan(
        {"call": "actor.train", "mode": "train", "ranks": [0, 1], "tp": 2, "after": "offload"},
        {"call": "actor.generate", "mode": "decode", "ranks": [0, 1], "dp": 2, "after": "drop"},
        {"call": "ref.logprobs", "mode": "score", "ranks": [0, 1], "tp": 2, "after": "offload"},
    )
    recipe = make_recipe(plan=path, **NO_DRAFTS_KEYS)
    plan = resolve_plan(recipe, flow, models, shapes)
    found = memory_by_device(Facts(recipe, models, shapes, parameters, plan, flow, LENGTHS))
    for one in found:
        half = shard(parameters["actor"], Layout.on((0, 1), tp=2).parallelism, one.ranks[0], 0).num_elements
        rows, during = dict(one.rows), dict(one.during)
        packed = packed_bytes(shape, "float32")
        left = rows["activations"]
        assert during["actor.generate"] == PROCESS_BYTES + 4 * count + row_of("actor: KV cache", rows) + packed + left
        assert during["actor.weights (move)"] == PROCESS_BYTES + 4 * (half + count)
        state = rows["actor: masters, moments and gradients, away when idle"]
        others = sum(rows.get(what, 0) for what in ("activations", "logits of one chunk", "gradient of the head"))
        assert during["actor.train"] == PROCESS_BYTES + 4 * half + state + others
        assert during["reading models"] == PROCESS_BYTES + 4 * (count + 2 * half) + state, (
            "parts, none read whole but one"
        )


def test_optimizer_state_is_divided_and_frozen_roles_share(make_recipe) -> None:
    recipe = make_recipe(plan="colocated", devices=2, dtype="bfloat16", **NO_DRAFTS_KEYS)
    _, models, shapes = facts_of(recipe)
    parameters, plan = parameters_of(models), resolved(recipe)
    whole = shard(parameters["actor"], Layout.on((0, 1), dp=2).parallelism, 0, 0).num_elements
    for rank in (0, 1):
        start, stop = zero_range(whole, rank, 2)
        assert dict(parameter_rows(rank, Placed(recipe, models, shapes, parameters, plan))) == {
            "actor: weights (bfloat16)": 2 * whole,
            "ref: weights (bfloat16)": 2 * whole,
            "actor: masters, moments and gradients": (stop - start) * (4 + 8) + 4 * whole,
        }
    divided = make_recipe(
        plan="colocated", devices=2, dtype="bfloat16", **{"optimizer.shard_gradients": True} | NO_DRAFTS_KEYS
    )
    rows = dict(parameter_rows(1, Placed(divided, models, shapes, parameters, plan)))
    start, stop = zero_range(whole, 1, 2)
    assert rows["actor: masters, moments and gradients"] == (stop - start) * (4 + 8 + 4) + 2 * 4 * whole
    twice = (*models, RoleModel("other", models[1].name, False, False, "model"))
    more = Plan("more", 2, (*plan.placements, Placement("other.logprobs", "score", (0, 1), dp=2)))
    rows = dict(parameter_rows(0, Placed(recipe, twice, shapes, parameters_of(twice), more)))
    assert rows["ref, other: weights (bfloat16)"] == 2 * whole
    adapted = make_recipe(plan="colocated", devices=2, **{"lora.rank": 2})
    rows = dict(parameter_rows(0, Placed(adapted, models, shapes, parameters, plan)))
    assert rows["actor, ref: weights (float32)"] == 4 * whole


@pytest.mark.process
def test_known_texts_lie_where_an_instance_may_draft(make_recipe, write_plan) -> None:
    """By default on each instance of one device, and by none in float64; of a model in parts where it is asked for, on
    the rank that drafts."""
    texts, budget = "texts that drafts are taken from, at most", 1 << 20
    parted = write_plan(
        {"call": "actor.train", "mode": "train", "ranks": [0, 1], "dp": 2},
        {"call": "actor.generate", "mode": "decode", "ranks": [0, 1], "tp": 2},
        {"call": "ref.logprobs", "mode": "score", "ranks": [0, 1], "dp": 2},
    )
    for keys, held in (
        ({"plan": "colocated"}, [budget, budget]),
        ({"plan": "colocated", "dtype": "float64"}, [0, 0]),
        ({"plan": parted}, [0, 0]),
        ({"plan": parted, "sampling.speculation": "adaptive"}, [budget, 0]),
    ):
        recipe = make_recipe(**{"devices": 2, "dtype": "bfloat16", "sampling.draft_pool_bytes": budget, **keys})
        flow, models, shapes = facts_of(recipe)
        placed = Placed(recipe, models, shapes, parameters_of(models), resolve_plan(recipe, flow, models, shapes))
        assert [dict(parameter_rows(rank, placed)).get(texts, 0) for rank in (0, 1)] == held


@pytest.mark.process
def test_a_dry_run_marks_calls_that_the_file_does_not_name(make_recipe, write_plan, capsys) -> None:
    plan = write_plan({"call": "actor.train", "mode": "train", "ranks": [0, 1], "tp": 2})
    assert dry_run(make_recipe(plan=plan)) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.split()[-1:] == ["keep"]]
    assert {line.split()[0]: line.split()[1] == "*" for line in lines} == {
        "actor.generate": True,
        "ref.logprobs": True,
        "actor.train": False,
    }


@pytest.mark.process
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"plan": "split", "devices": 2}, "one instance generates"),
        ({"plan": "colocated", "devices": 2, "options": {}}, "no model scores samples where they are generated"),
        ({"plan": "colocated", "devices": 2}, ""),
        ({"plan": "colocated"}, ""),
    ],
)
def test_a_dry_run_says_where_fusion_has_nothing_to_hide(make_recipe, capsys, keys, said) -> None:
    """On one device nobody expects it."""
    assert dry_run(make_recipe(**keys)) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if "fusion" in line]
    assert printed == ([f"fusion has nothing to hide: {said}"] if said else [])


@pytest.mark.process
def test_a_dry_run_prints_where_calls_run(make_recipe, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(make_recipe(plan="split", devices=4)) == 0
    printed = capsys.readouterr().out
    for row in (r"actor.generate  decode  0,1", "ref.logprobs    score   0,1", "actor.train     train   2,3"):
        assert row in printed
    assert "device 0,1  device 2,3" in printed
    assert dry_run(make_recipe()) == 0
    assert "device" not in capsys.readouterr().out


@pytest.mark.process
def test_a_dry_run_prints_what_is_there_during_each_call(make_recipe, write_plan, capsys) -> None:
    path = write_plan({"call": "actor.train", "mode": "train", "ranks": [0], "after": "offload"}, num_ranks=1)
    assert dry_run(make_recipe(plan=path)) == 0
    printed = capsys.readouterr().out
    for row in (
        "moments and gradients, away when idle",
        "all of it during actor.generate",
        "\nthe most of these",
        "\nat most",
    ):
        assert row in printed


@pytest.mark.process
def test_a_run_keeps_its_plan_and_may_go_on_with_another(make_recipe, write_plan) -> None:
    recipe = make_recipe(steps=1)
    run(recipe)
    stored = recipe.run_dir / "plan.json"
    assert replace(Plan.load(stored), predicted=None) == resolved(recipe)
    other = make_recipe(steps=2, plan=write_plan({"call": "actor.train", "mode": "train", "ranks": [0]}, num_ranks=1))
    run(other, resume=True)
    assert replace(Plan.load(stored), predicted=None) == resolved(other)
    assert Plan.load(stored).name == "mine"


def test_the_plan_file_in_the_docs_is_the_example() -> None:
    text = (ROOT / "examples" / "two_devices.json").read_text()
    assert f"```json\n{text}```" in (ROOT / "docs" / "plans.md").read_text()
    assert {p.mode for p in Plan.from_json(text).placements} == {"train", "decode", "score"}
