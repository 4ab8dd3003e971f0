"""What a recipe asks of its flow, sampling and lengths, checked before any work. Loads no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.algorithms.grpo import GRPOOptions
from plait.dataflow import CallKind, Dataflow, Grain, Level, Node
from plait.dataflow.made_rows import made_from, prompts_each, samples_each, samples_of_prompt, source_of
from plait.errors import ConfigError, FlowError
from plait.models.files.hub import classes_of, is_classifier
from plait.models.files.known_shapes import is_shape
from plait.models.shape import ModelShape
from plait.policy.blocks import BLOCK_TOKENS, num_blocks_for
from plait.recipes.length_limits import prompt_limit
from plait.recipes.recipe import Recipe, check_read
from plait.recipes.role_models import REWARD_ROLES, RoleModel, ToCome, reward_of
from plait.settings import Settings

_CALLS = {
    "actor": {"generate", "logprobs", "entropies", "top_logprobs", "train"},
    "ref": {"generate", "logprobs", "entropies", "top_logprobs"},
    "judge": {"generate", "logprobs", "entropies", "top_logprobs"},
    "critic": {"values", "score", "train"},
    "cost_critic": {"values", "score", "train"},
    "reward": {"score", "train"},
    "cost": {"score", "train"},
}
"""What each role can be asked."""


def check_sampling(flow: Dataflow, recipe: Recipe) -> None:
    """
    Raises:
        ConfigError: temperature 0 in a training recipe; a buffer of DAPO that is longer than responses.
    """
    sampling = recipe.sampling
    buffer = flow.options.overlong_buffer_tokens if isinstance(flow.options, GRPOOptions) else 0
    if buffer > sampling.max_response_tokens and not recipe.lets_be("options"):
        raise ConfigError(
            f"`options.overlong_buffer_tokens` is {buffer}, but responses have at most {sampling.max_response_tokens} "
            "tokens (`sampling.max_response_tokens`), so each would be penalised; lower the first or raise the second"
        )
    for node in flow.of_kind(CallKind.GENERATE):
        if (most := node.generation.max_tokens) is not None and most > sampling.max_response_tokens:
            raise ConfigError(
                f"{node.call} of the flow `{flow.name}` may say {most} tokens (`max_tokens`), but "
                f"`sampling.max_response_tokens` is {sampling.max_response_tokens}, for which memory is planned; raise "
                "it, or lower `max_tokens`"
            )
    if sampling.temperature == 0:
        raise ConfigError(
            "`sampling.temperature` is 0: every sample of a group would be the same; give a value above 0"
        )


def running_kept(recipe: Recipe, shape: ModelShape, *, is_stated: bool) -> int:
    """`sampling.max_running`; where that is not stated, and keys and values are kept over an update, no more than
    certainly have room: what gave way would be computed again, of other weights, and nobody would know. Raises
    ConfigError where it is stated, and there may be no room for so many."""
    running = recipe.sampling.max_running
    if not recipe.update_rule.keeps:
        return running
    most = prompt_limit(recipe, shape) + recipe.sampling.max_response_tokens
    blocks, each = recipe.sampling.num_blocks(shape.max_positions), num_blocks_for(most)
    if is_stated and blocks < running * each:
        raise ConfigError(
            f"`partial_rollout` is keep, but keys and values have room for {blocks * BLOCK_TOKENS} tokens and "
            f"`sampling.max_running` ({running}) samples of {most} tokens take {running * each * BLOCK_TOKENS}: a "
            "preempted sample would be computed again. Raise `sampling.kv_tokens` (or `sampling.kv_memory`), lower "
            "`sampling.max_running` or `data.max_prompt_tokens`, or set `partial_rollout` to recompute"
        )
    return min(running, blocks // each)


def check_calls(flow: Dataflow) -> None:
    """Raises FlowError where a role is asked for what it cannot do, or nothing is trained."""
    for node in flow.nodes:
        if node.kind is CallKind.COMPUTE or node.role is None:
            continue
        call = node.asks
        if call == "generate" and (problem := _problem_of_made(node, flow)) is not None:
            raise FlowError(f"flow `{flow.name}`: {node.call} {problem}")
        can_be_asked = _CALLS[reward_of(node.role) or node.role]
        if call not in can_be_asked:
            can = ", ".join(sorted(can_be_asked))
            raise FlowError(f"flow `{flow.name}`: role `{node.role}` cannot `{call}`; it can {can}")
        if node.role in REWARD_ROLES and {"score", "train"} <= flow.call_kinds(node.role):
            raise FlowError(f"flow `{flow.name}`: role `{node.role}` scores and is trained; take two flows for that")


def _problem_of_made(node: Node, flow: Dataflow) -> str | None:
    """Why a call cannot answer prompts that are made of samples; None: it can, or it answers those of the step."""
    if source_of(flow, node.id).kind is CallKind.GENERATE or flow.of_step_prompts:
        return None
    return (
        "answers prompts that are made of given samples, but the flow generates from no prompts of its own, and "
        "`data` is read as one or the other; generate from `prompts`, too"
    )


def _set_in(section: Settings, plain: Settings | None) -> str:
    """The keys of a section whose values differ from the defaults `plain`, in words."""
    keys = [] if plain is None else [key for key, value in section if value != getattr(plain, key)]
    return f" (its {', '.join(f'`{key}`' for key in keys)})" if keys else ""


def check_unused(flow: Dataflow, recipe: Recipe) -> None:
    """Raises ConfigError where a section says something that this flow, or the rest of the section, has no use for."""
    rollouts = flow.of_kind(CallKind.GENERATE)
    generates = bool(rollouts)
    sections = (
        ("reward", "reward" in flow.roles or bool(recipe.evaluation.functions)),  # those have its limits
        ("cost", "cost" in flow.roles),
        ("critic", "critic" in flow.roles),
        ("cost_critic", "cost_critic" in flow.roles),
        ("reference", "ref" in flow.roles),
        ("judge", "judge" in flow.roles),
        ("sampling", generates),
        ("pretraining", generates and bool(flow.of_kind(CallKind.READ))),
    )
    default = Recipe(model=recipe.model, data=recipe.data)
    for name, used in sections:
        section, plain = getattr(recipe, name), getattr(default, name)
        if not used and section != plain:
            what = f"has no role `{name}`" if name in _CALLS else "generates nothing"
            if name == "reference":
                free = recipe.options.get("reference_free")
                why = "`options.reference_free` is true" if free else "`options.kl_coef` above 0 makes most of them"
                what = f"asks no reference ({why})"
            if name == "pretraining":
                what = "reads no examples beside its prompts (`options.ptx_coef` above 0 makes most of them)"
            raise ConfigError(
                f"`{name}` is set, but the flow `{flow.name}` {what}; remove the section `{name}`"
                f"{_set_in(section, plain)}"
            )
    for name in ("reference", "lora", "evaluation"):
        if not recipe.lets_be(name):
            check_read(name, getattr(recipe, name))
    if recipe.reference.sync_every and recipe.lora.rank:
        raise ConfigError(
            f"`reference.sync_every` is {recipe.reference.sync_every}, but with adapters (`lora.rank` "
            f"{recipe.lora.rank}) the reference is the weights that all roles share; set one of them to 0"
        )
    given = bool(flow.of_kind(CallKind.READ)) and not generates
    draws = default.samples_per_prompt if recipe.lets_be("samples_per_prompt") else recipe.samples_per_prompt
    asked = any(node.generation.samples_per_prompt is None for node in rollouts)
    stated = "".join(f" ({node.generation.samples_per_prompt} in {node.call})" for node in rollouts)
    keys = (
        ("samples_per_prompt", draws != default.samples_per_prompt and not generates, "draws none"),
        ("samples_per_prompt", draws != default.samples_per_prompt and not asked, f"states how many it draws{stated}"),
        ("data.max_example_tokens", recipe.data.max_example_tokens is not None and not given, "reads prompts there"),
        ("data.weight", recipe.data.weight is not None and not recipe.data.more, "has one source of data"),
    )
    for key, is_set, why in keys:
        if is_set:
            raise ConfigError(f"`{key}` is set, but the flow `{flow.name}` {why}; remove it")


def check_trained_steps(flow: Dataflow, recipe: Recipe) -> None:
    """Raises ConfigError where a role would never be trained, a step has fewer samples than mini-batches or than
    comparing them needs, or a sample reads one number of several others."""
    _check_groups(flow, recipe)
    _check_single_values(flow, recipe)
    for node in flow.of_kind(CallKind.TRAIN):
        role, made_by, options = str(node.role), flow.nodes[node.rows], node.training
        if flow.optimizer_steps(role, recipe.steps) == 0:
            raise ConfigError(
                f"`steps` is {recipe.steps}, but {node.call} does nothing in the first {options.after} steps "
                "(`options.critic_warmup_steps` in ppo and safe_rlhf); give more `steps`, or a shorter warm-up"
            )
        per_group = samples_of_prompt(made_by, recipe.samples_per_prompt)
        num_groups = recipe.prompts_per_step * prompts_each(flow, made_by, recipe.samples_per_prompt)
        count = num_groups if options.whole_groups else num_groups * per_group
        if options.mini_batches > count:
            raise ConfigError(
                f"{node.call} takes {options.mini_batches} mini-batches (`options.mini_batches`), but a step "
                f"has {count} {'groups' if options.whole_groups else 'samples'}; lower the former, or raise "
                "`prompts_per_step`"
            )


def _check_groups(flow: Dataflow, recipe: Recipe) -> None:
    for node in flow.of_kind(CallKind.COMPUTE):
        drawn = flow.nodes[node.rows]
        if drawn.kind is not CallKind.GENERATE:
            continue
        per_group = drawn.generation.num_samples(recipe.samples_per_prompt)
        least = node.computing.least_samples
        if per_group < least:
            states = f"{drawn.call} states `samples_per_prompt` {per_group}"
            found = f"`samples_per_prompt` is {per_group}" if drawn.generation.samples_per_prompt is None else states
            alone = "another algorithm (reinforce_pp, remax, ppo)"
            instead = "`options.group_baseline: false`" if flow.name == "reinforce_pp" else alone
            if (made_of := made_from(flow.nodes, drawn.id)) and flow.nodes[made_of[-1]].kind is CallKind.GENERATE:
                first = flow.nodes[made_of[-1]].call
                instead = f"begin the columns with one of {first}, whose groups are those of the prompts of the data"
            raise ConfigError(
                f"{found}, but `{node.call}` of the flow `{flow.name}` compares the samples of a prompt; give {least} "
                f"or more, or {instead}"
            )


def _check_single_values(flow: Dataflow, recipe: Recipe) -> None:
    """Raises ConfigError where each sample is to read one number of what was made of it, of which there are several."""
    for node in flow.nodes:
        if node.kind is not CallKind.TRAIN and not (node.kind is CallKind.COMPUTE and node.grain is Grain.SAMPLE):
            continue
        for column in (one for one in node.inputs.values() if one.level is Level.SAMPLE):
            count = samples_each(flow, node.rows, column.rows, recipe.samples_per_prompt)
            if count > 1:
                made = flow.nodes[column.rows].call
                raise ConfigError(
                    f"{node.call} of the flow `{flow.name}` reads {column} of {made}, expected one sample of that call "
                    f"for each of {flow.nodes[node.rows].call}, found {count}; give {made} `samples_per_prompt=1`, or "
                    "make one number of them (`parse_grades`, or `per_group` with a column of "
                    f"{flow.nodes[node.rows].call} first)"
                )


def check_models(models: Sequence[RoleModel], to_come: Mapping[str, ToCome]) -> None:
    """Raises ConfigError where a role that speaks begins as a reward model, or one that scores as a language model.
    A shape alone is of either kind.

    Args:
        to_come: key of the recipe → the model that will stand there.
    """
    # Those of a reward come last, and in their order: the graph asks the first of them last.
    for model in sorted(models, key=lambda model: (len(model.role), model.role) if model.reward else (0, "")):
        coming = to_come.get(model.key)
        if coming is None and is_shape(model.name):
            continue
        name = model.name if coming is None else coming.name
        classes = [] if coming is not None else classes_of(model.name)
        scores = is_classifier(classes) if coming is None else coming.scalar
        if scores and not model.scalar:
            raise ConfigError(
                f"key `{model.key}`: `{name}` is a reward model{_listed(classes)}, but the role `{model.role}` begins "
                "as a causal language model"
            )
        if model.scalar and not model.trained and not scores:
            remedy = f"set `{model.role}.model` to" if model.key == "model" else "give"
            raise ConfigError(
                f"key `{model.key}`: `{name}` is a language model{_listed(classes)} without a head for scores, "
                f"and the flow does not train the role `{model.role}`; {remedy} a reward model (a "
                "`...ForSequenceClassification` with one label; `algorithm: reward_model` trains one)"
            )


def _listed(classes: list[str]) -> str:
    return f" ({', '.join(classes)})" if classes else ""
