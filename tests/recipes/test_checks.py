"""What a recipe asks of its flow, sampling and lengths is refused before any work, by the key to change."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.algorithms.grpo import GRPOOptions, grpo
from plait.dataflow import Dataflow, Resample, build_prompts, per_group, per_sample, trace
from plait.errors import ConfigError, FlowError
from plait.models.shape import ModelShape
from plait.recipes import checks
from plait.recipes.algorithm import BUILT_IN, load_flow, trace_algorithm
from plait.recipes.length_limits import prompt_limit
from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import load_recipe
from plait.recipes.role_models import RoleModel, ToCome
from plait.recipes.staleness_checks import check_staleness
from plait.recipes.turn_checks import said_of_rounds

SIZES = {"layers": 1, "hidden": 8, "intermediate": 16, "heads": 2, "kv_heads": 2, "head_dim": 4}
SHAPE = ModelShape(**SIZES, vocabulary=32, tied=True, max_positions=100, attention_parameters=8 * 4 * (2 * 2 + 2 * 2))
ROLES = ("actor", "ref", "critic", "reward", "cost", "cost_critic")


def recipe_of(**keys: Any) -> Recipe:
    return load_recipe(None, list({"model": "m", "data.source": "d", **keys}.items()))


def built_in(name: str, **options: Any) -> Dataflow:
    return trace_algorithm(load_flow(name), options, ROLES)


def loss(batch):
    return batch


# -- lengths


@pytest.mark.parametrize(
    ("keys", "most"),
    [
        ({"sampling.max_response_tokens": 60}, 40),
        ({"sampling.max_response_tokens": 99}, 1),
        ({"sampling.max_response_tokens": 60, "data.max_prompt_tokens": 7}, 7),
        ({"sampling.max_response_tokens": 60, "sampling.kv_tokens": 64}, 4),
        ({"sampling.max_response_tokens": 60, "sampling.kv_tokens": 79}, 4),
        ({"sampling.max_response_tokens": 60, "sampling.kv_tokens": 4096}, 40),
    ],
)
def test_a_prompt_has_what_positions_and_pool_leave(keys: dict[str, Any], most: int) -> None:
    assert prompt_limit(recipe_of(**keys), SHAPE) == most


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"sampling.max_response_tokens": 100},
            r"`sampling.max_response_tokens` \(100\) and a prompt of .* the 100 positions of `m`; lower `s",
        ),
        (
            {"sampling.max_response_tokens": 60, "data.max_prompt_tokens": 41},
            r"\(41\) .* \(60\) exceed the 100 positions of `m`",
        ),
        (
            {"sampling.max_response_tokens": 60, "data.max_prompt_tokens": 5, "sampling.kv_tokens": 79},
            r"\(5\) .* \(60\) exceed the 64 tokens of the KV pool",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_both_lengths(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        prompt_limit(recipe_of(**keys), SHAPE)


def test_keys_and_values_that_are_kept_need_room_for_all_that_run() -> None:
    # Four samples of 12 + 20 tokens take two blocks of 16 each.
    keys = {"data.max_prompt_tokens": 12, "sampling.max_response_tokens": 20, "sampling.max_running": 4}

    def running(partial_rollout: str, kv_tokens: int, *, is_stated: bool = True) -> int:
        recipe = recipe_of(**keys, partial_rollout=partial_rollout, **{"sampling.kv_tokens": kv_tokens})
        return checks.running_kept(recipe, SHAPE, is_stated=is_stated)

    assert running("keep", 128) == running("recompute", 64) == 4
    with pytest.raises(ConfigError, match=r"room for 112 tokens and `sampling.max_running` \(4\) .* take 128:"):
        running("keep", 127)
    of_a_device = [running("keep", kv_tokens, is_stated=False) for kv_tokens in (32, 95, 127, 128, 4096)]
    assert of_a_device == [1, 2, 3, 4, 4], "what nobody stated gives way"
    assert running("recompute", 64, is_stated=False) == 4


@pytest.mark.parametrize("prompt_tokens", [None, 1, 30])
@pytest.mark.parametrize("kv_tokens", [64, 96, 100, 1000, None])
def test_what_a_device_runs_by_itself_has_always_room(kv_tokens: int | None, prompt_tokens: int | None) -> None:
    """Samples of any length up to the model's positions: what is found is not refused, and one more would be."""
    stated = {"data.max_prompt_tokens": prompt_tokens, "sampling.kv_tokens": kv_tokens}
    keys = {key: value for key, value in stated.items() if value is not None} | {"sampling.max_response_tokens": 33}
    recipe = recipe_of(**keys, partial_rollout="keep")
    running = checks.running_kept(recipe, SHAPE, is_stated=False)
    found = [
        recipe_of(**keys, partial_rollout="keep", **{"sampling.max_running": count}) for count in (running, running + 1)
    ]
    assert checks.running_kept(found[0], SHAPE, is_stated=True) == running >= 1
    if kv_tokens is None:
        assert running == 64
    else:
        with pytest.raises(ConfigError, match="`partial_rollout` is keep, but"):
            checks.running_kept(found[1], SHAPE, is_stated=True)


# -- sampling and staleness


class TighterOptions(GRPOOptions):
    least: int = 1


def tighter(prompts, actor, reward, options: TighterOptions):
    grpo(prompts, actor, reward, options)


def test_training_does_not_sample_greedily() -> None:
    with pytest.raises(ConfigError, match=r"^`sampling.temperature` is 0"):
        checks.check_sampling(built_in("rloo"), recipe_of(**{"sampling.temperature": 0}))
    checks.check_sampling(built_in("rloo"), recipe_of(**{"sampling.temperature": 0.7, "sampling.top_p": 0.9}))


@pytest.mark.parametrize("flow", [grpo, tighter])
def test_a_buffer_of_overlong_responses_is_a_part_of_their_limit(flow: Callable[..., Any]) -> None:
    """In a flow of the user's with the options of `grpo`, too."""
    keys = {"options": {"overlong_buffer_tokens": 65}, "sampling.max_response_tokens": 64}
    graph = trace_algorithm(flow, keys["options"], ROLES)
    with pytest.raises(ConfigError, match=r"^`options.overlong_buffer_tokens` is 65, but responses have at most 64"):
        checks.check_sampling(graph, recipe_of(**keys))
    checks.check_sampling(graph, recipe_of(**keys).letting_be())
    checks.check_sampling(graph, recipe_of(**keys | {"sampling.max_response_tokens": 65}))


def after_scoring(prompts, actor, ref):
    """A rollout whose prompts the step scores before."""
    first = actor.generate(prompts)
    actor.train(first, loss=loss)
    actor.generate(prompts)


def again(prompts, actor):
    resample = Resample(lambda rewards: True, at_most=2)
    actor.train(actor.generate(prompts, resample=resample), loss=loss)


@pytest.mark.parametrize(
    ("flow", "keys", "said"),
    [
        (built_in("grpo"), {"partial_rollout": "keep"}, "with `max_staleness` 0 no sample is running"),
        (built_in("dpo"), {"max_staleness": 1}, "flow `dpo` generates no samples"),
        (
            trace(after_scoring, roles=ROLES),
            {"max_staleness": 1},
            "actor.generate#2 of the flow `after_scoring` waits for actor.train of the same step",
        ),
        (built_in("remax"), {"max_staleness": 1, "partial_rollout": "keep"}, "flow `remax` generates more than once"),
        (
            built_in("grpo"),
            {"max_staleness": 1, "partial_rollout": "keep", "rebalance": "auto"},
            "`partial_rollout` is keep and `rebalance` is auto",
        ),
        (
            built_in("grpo"),
            {"max_staleness": 1, "partial_rollout": "recompute", "fusion": 0.2},
            "`partial_rollout` is recompute and `fusion` is 0.2",
        ),
    ],
)
def test_samples_are_drawn_ahead_only_where_nothing_of_the_step_is_needed(flow, keys, said) -> None:
    with pytest.raises(ConfigError, match=said):
        check_staleness(flow, recipe_of(**keys))


@pytest.mark.parametrize("keys", [{}, {"max_staleness": 2}, {"max_staleness": 1, "partial_rollout": "recompute"}])
def test_grpo_may_be_stale(keys: dict[str, Any]) -> None:
    check_staleness(built_in("grpo"), recipe_of(**keys))


# -- calls and sections


def test_every_built_in_flow_asks_what_its_roles_can() -> None:
    for name in BUILT_IN:
        checks.check_calls(built_in(name))
    for name in ("ppo", "safe_rlhf"):
        checks.check_calls(built_in(name, bootstrap_truncated=True))


def asks_for_values(prompts, actor, ref):
    samples = actor.generate(prompts)
    ref.values(samples)
    actor.train(samples, loss=loss)


def scores_and_trains(prompts, actor, reward):
    samples = actor.generate(prompts)
    reward.score(samples)
    reward.train(samples, loss=loss)
    actor.train(samples, loss=loss)


@pytest.mark.parametrize(
    ("flow", "said"),
    [
        (asks_for_values, "role `ref` cannot `values`; it can entropies, generate, logprobs"),
        (scores_and_trains, "role `reward` scores and is trained"),
    ],
)
def test_a_role_is_asked_only_what_it_can(flow: Any, said: str) -> None:
    with pytest.raises(FlowError, match=rf"flow `{flow.__name__}`: {said}"):
        checks.check_calls(trace(flow, roles=ROLES))


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        (
            "grpo",
            {"critic.model": "c"},
            r"^`critic` is set, but the flow `grpo` has no role `critic`; remove the section `critic` \(its `model`\)$",
        ),
        ("grpo", {"reference.sync_every": 5}, r"^`reference` is set, .* asks no reference \(`options.kl_coef`"),
        ("grpo", {"pretraining.source": "p"}, r"^`pretraining` is set, .* reads no examples beside its prompts"),
        ("dpo", {"sampling.temperature": 0.5}, r"^`sampling` is set, .* generates nothing"),
        ("dpo", {"samples_per_prompt": 3}, r"^`samples_per_prompt` is set, .* draws none"),
        ("grpo", {"data.max_example_tokens": 9}, r"^`data.max_example_tokens` is set, .* reads prompts there"),
        ("grpo", {"data.weight": 2.0}, r"^`data.weight` is set, .* has one source of data"),
    ],
)
def test_what_a_flow_has_no_use_for_is_refused_by_name(name: str, keys: dict[str, Any], said: str) -> None:
    flow = built_in(name, **({"kl_coef": 0.0} if name == "grpo" else {}))
    with pytest.raises(ConfigError, match=said):
        checks.check_unused(flow, recipe_of(**keys))
    checks.check_unused(flow, recipe_of())


def test_a_loss_without_a_reference_names_the_option_that_makes_it_so() -> None:
    recipe = recipe_of(**{"reference.sync_every": 5, "options.reference_free": True})
    said = r"^`reference` is set, but the flow `dpo` asks no reference \(`options.reference_free` is true\); remove the"
    with pytest.raises(ConfigError, match=said):
        checks.check_unused(built_in("dpo", reference_free=True), recipe)


def four_of_each(prompts, actor):
    actor.train(actor.generate(prompts, samples_per_prompt=4), loss=loss)


def one_more(prompts, actor):
    actor.generate(prompts, samples_per_prompt=1)
    actor.train(actor.generate(prompts), loss=loss)


def test_a_number_of_samples_that_no_rollout_takes_is_refused() -> None:
    """A run that has begun with it goes on, and beside stages it may be for another one."""
    flow, recipe = trace(four_of_each, roles=ROLES), recipe_of(samples_per_prompt=2)
    said = r"^`samples_per_prompt` is set, but .* states how many it draws \(4 in actor.generate\); remove it$"
    with pytest.raises(ConfigError, match=said):
        checks.check_unused(flow, recipe)
    checks.check_unused(flow, recipe.letting_be())
    checks.check_unused(flow, recipe_of())
    checks.check_unused(trace(one_more, roles=ROLES), recipe)


def test_a_reference_that_shares_its_weights_cannot_follow() -> None:
    keys = {"reference.sync_every": 5, "lora.rank": 8}
    with pytest.raises(ConfigError, match=r"`reference.sync_every` is 5, but with adapters \(`lora.rank` 8\)"):
        checks.check_unused(built_in("grpo", kl_coef=0.1), recipe_of(**keys))


# -- steps and mini-batches


def in_batches(prompts, actor):
    actor.train(actor.generate(prompts), loss=loss, mini_batches=7)


def in_batches_of_groups(prompts, actor):
    actor.train(actor.generate(prompts), loss=loss, mini_batches=4, whole_groups=True)


def late(prompts, actor):
    actor.train(actor.generate(prompts), loss=loss, after=5)


@pytest.mark.parametrize(
    ("flow", "keys", "said"),
    [
        (in_batches, {"prompts_per_step": 3, "samples_per_prompt": 2}, r"7 mini-batches .* a step has 6 samples"),
        (in_batches_of_groups, {"prompts_per_step": 3}, r"4 mini-batches .* a step has 3 groups"),
        (late, {"steps": 5}, r"`steps` is 5, but actor.train does nothing in the first 5 steps"),
    ],
)
def test_a_step_trains_on_something(flow: Any, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checks.check_trained_steps(trace(flow, roles=ROLES), recipe_of(**keys))


def one_compared(prompts, actor, reward):
    samples = actor.generate(prompts, samples_per_prompt=1)
    per_group(sorted, reward.score(samples), name="ranks", least_samples=2)
    actor.train(samples, loss=loss)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("grpo", r"another algorithm \(reinforce_pp, remax, ppo\)"),
        ("rloo", r"another algorithm \(reinforce_pp, remax, ppo\)"),
        ("reinforce_pp", "`options.group_baseline: false`"),
    ],
)
def test_groups_that_are_compared_need_two_samples(name: str, remedy: str) -> None:
    flow = built_in(name, **({"group_baseline": True} if name == "reinforce_pp" else {}))
    said = rf"`samples_per_prompt` is 1, but `\w+` of the flow `{name}` compares the .*; give 2 or more, or {remedy}$"
    with pytest.raises(ConfigError, match=said):
        checks.check_trained_steps(flow, recipe_of(samples_per_prompt=1))
    checks.check_trained_steps(flow, recipe_of(samples_per_prompt=2))
    checks.check_trained_steps(built_in("reinforce_pp"), recipe_of(samples_per_prompt=1))
    with pytest.raises(ConfigError, match=r"^actor.generate states `samples_per_prompt` 1, but"):
        checks.check_trained_steps(trace(one_compared, roles=ROLES), recipe_of())


@pytest.mark.parametrize(
    ("flow", "keys"),
    [
        (in_batches, {"prompts_per_step": 7, "samples_per_prompt": 1}),
        (in_batches_of_groups, {"prompts_per_step": 4, "samples_per_prompt": 1}),
        (late, {"steps": 6}),
    ],
)
def test_just_enough_is_enough(flow: Any, keys: dict[str, Any]) -> None:
    checks.check_trained_steps(trace(flow, roles=ROLES), recipe_of(**keys))


# -- models


def model_folder(tmp_path: Path, *classes: str) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": classes}))
    return str(tmp_path)


def test_a_reward_model_cannot_speak_and_a_language_model_cannot_score(tmp_path: Path) -> None:
    name = model_folder(tmp_path, "LlamaForSequenceClassification")
    actor = RoleModel("actor", name, scalar=False, trained=True, key="model")
    with pytest.raises(ConfigError, match=r"`model`: .* reward model \(LlamaForSequenceClassification\), but .*actor"):
        checks.check_models([actor], {})
    reward = RoleModel("reward", name, scalar=True, trained=False, key="reward.model")
    checks.check_models([reward], {})
    model_folder(tmp_path, "LlamaForCausalLM")
    checks.check_models([actor], {})
    with pytest.raises(ConfigError, match=r"key `reward.model`: .* language model \(LlamaForCausalLM\) without a head"):
        checks.check_models([reward], {})
    critic = RoleModel("critic", name, scalar=True, trained=True, key="model")
    checks.check_models([critic], {})
    with pytest.raises(ConfigError, match=r"does not train the role `critic`; set `critic.model` to a reward model"):
        checks.check_models([replace(critic, trained=False)], {})


def test_of_several_wrong_reward_models_the_first_is_named(tmp_path: Path) -> None:
    """Though a graph asks it last."""
    name = model_folder(tmp_path, "LlamaForCausalLM")
    first, *others = (
        RoleModel(role, name, scalar=True, trained=False, key=f"reward.model[{place}]", reward="reward")
        for place, role in enumerate(("reward", *(f"reward_{number}" for number in range(2, 11))))
    )
    for models in ([*others, first], [*reversed(others), first]):
        with pytest.raises(ConfigError, match=r"^key `reward.model\[0\]`"):
            checks.check_models(models, {})
    with pytest.raises(ConfigError, match=r"^key `reward.model\[1\]`"):
        checks.check_models([*reversed(others)], {})


def test_a_model_that_is_still_to_be_made_is_what_its_stage_makes() -> None:
    reward = RoleModel("reward", "@judge", scalar=True, trained=False, key="reward.model")
    checks.check_models([reward], {"reward.model": ToCome("@judge", scalar=True)})
    with pytest.raises(ConfigError, match=r"`@judge` is a language model without a head for scores"):
        checks.check_models([reward], {"reward.model": ToCome("@judge", scalar=False)})


def of_scores(batch, scores):
    return scores


def asks(completions):
    return completions


def reads_two(prompts, actor, judge):
    samples = actor.generate(prompts)
    verdicts = judge.generate(build_prompts(samples, asks), samples_per_prompt=2)
    actor.train(samples, loss=of_scores, scores=per_sample(abs, verdicts.finished, name="sure"))


def computes_from_two(prompts, actor, judge):
    samples = actor.generate(prompts)
    verdicts = judge.generate(build_prompts(samples, asks))
    sums = per_sample(max, samples.finished, verdicts.finished, name="sums")
    actor.train(samples, loss=of_scores, scores=sums)


def compares_second_attempts(prompts, actor, judge):
    attempts = actor.generate(build_prompts(actor.generate(prompts), asks), samples_per_prompt=1)
    ranks = per_group(sorted, attempts.finished, name="ranks", least_samples=2)
    actor.train(attempts, loss=of_scores, scores=ranks)


def compares_by_prompt(prompts, actor, judge):
    """Each second attempt reads what its first one was given; each first one the number of its only verdict."""
    first = actor.generate(prompts)
    attempts = actor.generate(build_prompts(first, asks), samples_per_prompt=2)
    ranks = per_group(max, first.finished, attempts.finished, name="ranks", least_samples=2)
    actor.train(attempts, loss=of_scores, scores=ranks)
    verdicts = judge.generate(build_prompts(first, asks), samples_per_prompt=1)
    actor.train(first, loss=of_scores, scores=verdicts.finished)


@pytest.mark.parametrize(
    ("flow", "said"),
    [
        (
            reads_two,
            r"^actor.train of the flow `reads_two` reads sure\[sample\] of judge.generate, expected one sample of that "
            r"call for each of actor.generate, found 2; give judge.generate `samples_per_prompt=1`, or make one number",
        ),
        (computes_from_two, r"^sums of the flow .* reads finished\[sample\] of judge.generate, .* found 3; give"),
        (
            compares_second_attempts,
            r"^actor.generate#2 states `samples_per_prompt` 1, but `ranks` .*; give 2 or more, or begin the columns "
            "with one of actor.generate, whose groups are those of the prompts of the data$",
        ),
    ],
)
def test_one_number_is_read_of_one_sample_that_is_made_of_another(flow: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checks.check_trained_steps(trace(flow, roles=(*ROLES, "judge")), recipe_of(samples_per_prompt=3))
    checks.check_trained_steps(trace(compares_by_prompt, roles=(*ROLES, "judge")), recipe_of(samples_per_prompt=3))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"max_staleness": 1}, None),
        (
            {"max_staleness": 1, "partial_rollout": "keep"},
            r"as with `partial_rollout` off: .* keep\) is not predicted",
        ),
        ({"turns.reply": "tools.py:reply"}, "responses count as drawn at once"),
        (
            {"turns.reply": "tools.py:reply", "max_staleness": 1, "partial_rollout": "recompute"},
            "drawn at once.*; samples count as with `partial_rollout` off",
        ),
    ],
)
def test_what_predictions_leave_out_is_said(keys: dict[str, Any], said: str | None) -> None:
    text = said_of_rounds(built_in("grpo"), recipe_of(**keys))
    assert text is None if said is None else text is not None and re.search(said, text)
