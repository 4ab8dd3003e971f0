"""What can be checked and resolved before any work: recipe, flow, data, rewards, lengths. Loads no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from plait.cost.estimate import model_shape
from plait.cost.generation_memory import kv_bytes_per_token, routed_bytes_per_token
from plait.cost.lengths import SampleLengths
from plait.cost.model_parameters import parameters_of
from plait.cost.placed import Facts
from plait.cost.placement import device_bytes_if_here, num_devices, resolve_plan
from plait.cost.spent_memory import LONG
from plait.data.records import FinishReason, Sample
from plait.data.replies import ReplyEncoder
from plait.dataflow import CallKind, Dataflow
from plait.errors import ModelError
from plait.models.files.known_shapes import is_shape
from plait.models.shape import ModelShape
from plait.observe.loading import loading
from plait.recipes.checks import check_models, check_trained_steps, running_kept
from plait.recipes.device_checks import check_device
from plait.recipes.engine_checks import abilities, check_engine_plan, check_stop
from plait.recipes.flow_checks import checked_flow
from plait.recipes.recipe import Recipe
from plait.recipes.recurrent_checks import check_kernels, with_states
from plait.recipes.reward_checks import check_parts
from plait.recipes.role_models import REWARD_ROLES, RoleModel, ToCome, draft_model, reward_settings, role_models
from plait.recipes.router_checks import check_balanced, check_replayed
from plait.recipes.token_checks import among_known
from plait.rewards.functions import RewardFunction, eval_functions_of, functions_of
from plait.runtime.folder.stored_recipe import with_sampling
from plait.runtime.inputs.notices import say_notices
from plait.runtime.inputs.prepared import NOTHING_KEPT, Kept, Outline, Prepared
from plait.runtime.inputs.reading import RunData, read_data
from plait.runtime.inputs.text_lengths import lengths_in
from plait.runtime.inputs.tokenizers import check_draft_model, check_ids, check_reach, check_roles, load_tokenizer
from plait.runtime.prediction.choosing import auto_plan, check_room
from plait.runtime.prediction.fusing import with_order
from plait.runtime.prediction.kept_plans import of_flow
from plait.runtime.prediction.network import THIS_ONE, Machines
from plait.runtime.prediction.run_planning import costs_of_run, planning_for_run, settled_by_costs
from plait.runtime.prediction.spending import held_positions, is_searched, settled, spending
from plait.schedule.placements import to_be_found
from plait.schedule.plan import Plan
from plait.vllm.environment import checked_environment


def prepare(
    recipe: Recipe,
    *,
    to_come: Mapping[str, ToCome] | None = None,
    trains: bool = True,
    kept: Kept = NOTHING_KEPT,
    machines: Machines = THIS_ONE,
) -> Prepared:
    """Resolve a recipe.

    Args:
        to_come: key → the model that an earlier stage will put there; until then one of its shape stands there.
        trains: False where the model is only measured: it may then be an adapter alone.
        kept: what an earlier stay of the run has found.
        machines: that the run is on.

    Raises:
        UserError: a key, the flow, the data or the model cannot be used; the message names the key and the remedy.
    """
    outlined = outline(recipe, to_come=to_come, trains=trains)
    check_device(recipe)
    recipe, models, shapes, plan = outlined.recipe, outlined.models, outlined.shapes, of_flow(kept.plan, outlined)
    if plan is None and not is_searched(recipe):
        plan = resolve_plan(recipe, outlined.flow, models, shapes, nodes=machines.count)
    _check_engine(recipe, plan)
    tokenizer = load_tokenizer(recipe.model)
    _check_models(models, tokenizer, recipe)
    data = read_data(outlined.flow, recipe, tokenizer, shapes[recipe.model], trains=trains)
    _check_texts(data, recipe, tokenizer, shapes[recipe.model].vocabulary)
    lengths = _lengths_in(data, recipe)
    check_reach(tokenizer, recipe.model, outlined.flow, _longest_of(outlined.flow, lengths, data), models, shapes)
    plan = plan or _searched(outlined, lengths, machines)
    outlined = spending(outlined, plan, lengths, is_alike=machines.alike)
    plan, recipe = settled_by_costs(outlined, kept.settled(plan), lengths, machines)
    recipe = _with_steps(recipe, outlined.flow, data)
    say_notices(outlined.flow, recipe, models if trains else ())
    plan = settled(replace(outlined, recipe=recipe), plan, lengths)
    if to_be_found(plan):
        facts = Facts(recipe, models, shapes, parameters_of(models), plan, outlined.flow, lengths)
        costs = partial(costs_of_run, outlined, lengths, machines, plan.num_ranks)
        plan = with_order(facts, costs, kept.orders)
    return Prepared(
        recipe,
        outlined.flow,
        models,
        shapes,
        plan,
        tokenizer,
        outlined.functions,
        outlined.eval_functions,
        data.columns,
        data.train_set,
        data.given,
        data.held_out,
        data.tools,
        machines.alike,
    )


def _with_steps(recipe: Recipe, flow: Dataflow, data: RunData) -> Recipe:
    """The recipe with as many steps as its epochs take."""
    if recipe.epochs is not None:
        num_rows = len(next(iter(data.given.values())) if data.train_set is None else data.train_set)
        recipe = recipe.model_copy(update={"steps": recipe.steps_of(num_rows), "epochs": None})
        check_trained_steps(flow, recipe)
    return recipe


def _searched(run: Outline, lengths: SampleLengths, machines: Machines) -> Plan:
    """The plan of a run that leaves it open. Says by which numbers it was found. Nothing is measured where it can be
    seen before that no plan has room."""
    planning = planning_for_run(run, lengths, replace(machines, measures=False))
    if machines.measures and not planning.calibration.exact:
        check_room(planning)
        planning = planning_for_run(run, lengths, machines)
    plan = auto_plan(planning)
    loading(f"the plan that was found by {planning.calibration.source}")
    return plan


def _check_engine(recipe: Recipe, plan: Plan | None) -> None:
    """Check that the engine supports the plan (None: the plan is still to be found), and that it is installed. Raises
    ConfigError."""
    check_engine_plan(recipe, recipe.plan, num_devices(recipe) if plan is None else plan.num_ranks)
    if abilities(recipe).computes_elsewhere:
        SET_UP[recipe.sampling.engine](recipe.device)


SET_UP: Mapping[str, Callable[[str], object]] = {"vllm": checked_environment}
"""`sampling.engine`, where that is another program → what raises ConfigError where it is not there for a `device`,
or untested."""

DRAFT_KEY = "sampling.draft_model"


def data_lengths(run: Outline) -> SampleLengths:
    """Tokens of what a run reads, as of `text_lengths.lengths_in`; of a model that has no tokenizer, as many as there
    may be.

    Raises:
        UserError: the data cannot be read.
    """
    recipe = run.recipe
    if is_shape(recipe.model):
        return run.lengths
    tokenizer = load_tokenizer(recipe.model)
    return _lengths_in(read_data(run.flow, recipe, tokenizer, run.shapes[recipe.model]), recipe)


def _lengths_in(data: RunData, recipe: Recipe) -> SampleLengths:
    return lengths_in(data.train_set, data.given, recipe.sampling.max_response_tokens)


def _longest_of(flow: Dataflow, lengths: SampleLengths, data: RunData) -> dict[str, int]:
    """Call that makes or reads samples → tokens of its longest one, with the prompt, as far as that is known; held-out
    ones count, too."""
    known = (*flow.of_step_prompts, *flow.of_kind(CallKind.READ))
    longest = {node.call: lengths.of(node.call).longest for node in known}
    for node in flow.of_kind(CallKind.GENERATE):
        if node.prompts is not None:  # functions write its prompts, which are looked at when they are there
            longest[node.call] = 1 + node.generation.limit(lengths.responses.longest)
    for call, items in (pair for held_out in data.held_out for pair in held_out.given.items()):
        of_items = [len(given.sample.prompt.token_ids) + len(given.sample.token_ids) for given in items]
        longest[call] = max(longest[call], *of_items)
    return longest


def outline(
    recipe: Recipe,
    *,
    to_come: Mapping[str, ToCome] | None = None,
    trains: bool = True,
    device_memory: int | None = None,
) -> Outline:
    """What can be resolved without devices, data and tokenizers; the models may be known by their shapes alone.

    Args:
        to_come, trains: as of `prepare`.
        device_memory: bytes of a device of another cluster than this machine, of which keys and values take a share.

    Raises:
        UserError: a key, the flow or a model cannot be used; the message names the key and the remedy.
    """
    dataflow = checked_flow(recipe, to_come=to_come or {}, trains=trains)
    generates = bool(dataflow.of_kind(CallKind.GENERATE))
    functions = {role: of_role for role in REWARD_ROLES if (of_role := _functions(role, dataflow, recipe))}
    check_parts(dataflow, recipe, functions)
    settings = recipe.evaluation
    eval_functions = eval_functions_of(settings.functions, settings.answer, task=recipe.data.task) if generates else ()
    if recipe.device == "cuda":
        recipe = recipe.by_default(micro_batch_tokens=LONG)
    models = role_models(dataflow, recipe)
    shapes = _shapes(models, recipe)
    recipe = with_states(recipe, dataflow, models, shapes)
    check_kernels(recipe, models, shapes)
    if trains:
        check_balanced(recipe, models, shapes)
        check_replayed(recipe, dataflow, models, shapes)
    dataflow = among_known(dataflow, recipe, models, shapes)
    drafts = recipe.sampling.draft_model
    if generates:
        shape, device = shapes[recipe.model], recipe.device
        drawing = {recipe.model, *(m.name for m in models if "generate" in dataflow.call_kinds(m.role))}
        token_bytes = max(kv_bytes_per_token(shapes[name], recipe.dtype) for name in drawing)
        if recipe.sampling.router_replay:
            token_bytes += max(routed_bytes_per_token(shapes[name], 0, shapes[name].layers) for name in drawing)
        if drafts is not None:  # beside each of them, for as many tokens
            token_bytes += kv_bytes_per_token(shapes[drafts], recipe.dtype)
        room = lambda: device_bytes_if_here(recipe, num_devices(recipe)) if device_memory is None else device_memory
        is_stated = recipe.sampling.states_running
        recipe = with_sampling(recipe, recipe.sampling.sized(held_positions(recipe, shape), token_bytes, device, room))
        running = running_kept(recipe, shape, is_stated=is_stated)
        if running < recipe.sampling.max_running:
            loading(
                f"{running} samples at a time, as `partial_rollout` keeps what each may take (`data.max_prompt_tokens`)"
            )
        recipe = with_sampling(recipe, recipe.sampling.model_copy(update={"max_running": running}))
    check_models(models if drafts is None else (*models, draft_model(drafts, DRAFT_KEY)), to_come or {})
    check_stop(recipe, shapes[recipe.model])
    return Outline(recipe, dataflow, models, shapes, functions, eval_functions)


def _ids_of(data: RunData) -> Iterator[tuple[str, Sequence[int]]]:
    """(place, token ids) of all that is read; nothing that is trained on is encoded before it is asked for."""
    for held_out in data.held_out:
        for prompt in held_out.prompts:
            yield held_out.title, prompt.token_ids
        for of_item in (given for items in held_out.given.values() for given in items):
            yield held_out.title, (*of_item.sample.prompt.token_ids, *of_item.sample.token_ids)
    for prompts in () if data.train_set is None else data.train_set.sets:
        for index, row in enumerate(prompts.kept):
            yield prompts.source[row].place, prompts.prompt(index, index).token_ids
    for examples in (sets for mixed in data.given.values() for sets in mixed.sets):
        for index, row in enumerate(examples.kept):
            for sample, _ in examples.given(index, index):
                yield examples.source[row].place, (*sample.prompt.token_ids, *sample.token_ids)


def _check_texts(data: RunData, recipe: Recipe, tokenizer: Any, vocabulary: int) -> None:
    """Raises ModelError where the data have tokens that the model lacks; DataError where its chat template has no place
    for a reply, as far as the first prompt of a source tells."""
    check_ids(tokenizer, vocabulary, _ids_of(data), recipe.model)
    if (replier := recipe.turns.replier) is not None and data.train_set is not None:
        encoder = ReplyEncoder(tokenizer, vocabulary, replier)
        role = "user" if data.tools is None else "tool"
        for prompts in data.train_set.sets:
            sample = Sample(prompts.prompt(0, 0), 0, (), (), "", FinishReason.STOP)
            encoder.token_ids(sample, [{"role": role, "content": "Go on."}])


def _shapes(models: tuple[RoleModel, ...], recipe: Recipe) -> dict[str, ModelShape]:
    """By the model's name.

    Raises:
        ModelError: a model cannot be used; the message begins with its key.
    """
    shapes: dict[str, ModelShape] = {}
    of_drafts = ((DRAFT_KEY, recipe.sampling.draft_model),)
    for key, name in (("model", recipe.model), *((model.key, model.name) for model in models), *of_drafts):
        if name is not None and name not in shapes:
            try:
                shapes[name] = model_shape(name)
            except ModelError as error:
                raise ModelError(str(error) if key == "model" else f"key `{key}`: {error}") from error
    return shapes


def _check_models(models: tuple[RoleModel, ...], tokenizer: Any, recipe: Recipe) -> None:
    """Raises ConfigError if a role or a draft model reads the run's token ids, but has another tokenizer, or if an
    adapter cannot be trained further; ModelError if `lora` names layers that a trained model does not have."""
    if (drafts := recipe.sampling.draft_model) is not None:
        check_draft_model(tokenizer, recipe.model, drafts, DRAFT_KEY)
    check_roles(tokenizer, recipe.model, models)
    if recipe.lora.rank > 0:
        from plait.models.lora_files import check_trained

        check_trained(recipe.lora, {f"key `{m.key}`, role `{m.role}`": m.name for m in models if m.trained})


def _functions(role: str, flow: Dataflow, recipe: Recipe) -> tuple[RewardFunction, ...]:
    """The functions that fill a reward role; none where the flow does not score by it, or models alone do."""
    settings = reward_settings(role, recipe)
    if "score" not in flow.call_kinds(role) or (settings.models and not settings.functions):
        return ()
    return functions_of(settings, task=recipe.data.task, role=role)
