"""Which plan a run follows: `plan` and `devices` of the recipe, resolved and checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from plait.cost.cluster import ClusterSpec
from plait.cost.held_parameters import parameter_rows
from plait.cost.model_parameters import needs_all_tokens, parameters_of
from plait.cost.model_work import ModelWork
from plait.cost.placed import Placed
from plait.cost.share_checks import check_shares
from plait.dataflow import Dataflow
from plait.errors import ConfigError, LayoutError
from plait.layout.params import Parameters
from plait.layout.shards import check, check_instances
from plait.memory_limits import limit
from plait.models.shape import ModelShape
from plait.recipes.plan_files import plan_file
from plait.recipes.recipe import Recipe
from plait.recipes.recurrent_checks import check_prompts
from plait.recipes.role_models import RoleModel, optimizer_of
from plait.schedule.completion import complete, with_shares
from plait.schedule.named_plans import AUTO, NAMES, PlannedModel, named_plan
from plait.schedule.placements import placements_of
from plait.schedule.plan import Plan

PARAMETERS_SHARE = 0.6
"""The share of a device's memory that weights and optimizer state may take before a named plan cuts the models; the
rest is for keys and values, activations and logits.
"""


def resolve_plan(
    recipe: Recipe,
    flow: Dataflow,
    models: Sequence[RoleModel],
    shapes: Mapping[str, ModelShape],
    *,
    nodes: int = 1,
) -> Plan:
    """The plan of a run: every call of every model placed, on layouts that its model and the devices allow.

    A named plan puts one copy of a model on each device; where weights and optimizer state of one would not leave room
    for the rest, on 2, 4, … devices.

    Args:
        models: which model each role begins as.
        shapes: by the model's name.
        nodes: machines that the ranks are on, equally many on each.

    Raises:
        ConfigError: `plan` or `devices` cannot be used, or a key of the plan file (which is named).
        DataError: the file cannot be read, or contradicts itself.
        LayoutError: a layout that the model or the devices do not allow; names the placement and the key.
    """
    if recipe.plan == AUTO:
        assert num_devices(recipe) == 1, "of several devices a plan is found (`runtime.planning`)"
        recipe = recipe.model_copy(update={"plan": NAMES[0]})
    planned = planned_models(recipe, models, shapes)
    if recipe.plan in NAMES:
        label, devices = f"`plan` {recipe.plan}", num_devices(recipe)
        plan = named_plan(recipe.plan, flow, planned, devices)
    else:
        label, plan = f"plan `{recipe.plan}`", _from_file(recipe)
    check_devices(recipe, plan, nodes)
    plan = on_nodes(plan, nodes, label)
    plan = complete(plan, flow, planned, label)
    check_plan(recipe, plan, models, shapes, label)
    if plan.num_ranks > 1:
        parameters = parameters_of(models)
        if recipe.plan in NAMES:
            placed = Placed(recipe, models, shapes, parameters, plan)
            plan = with_room(flow, planned, placed, device_bytes(recipe, plan.cluster.devices))
            check_plan(recipe, plan, models, shapes, label)
        check_layouts(plan, parameters, label)
    return plan


def on_nodes(plan: Plan, nodes: int, label: str) -> Plan:
    """A plan whose ranks are on so many machines.

    Raises:
        LayoutError: the machines cannot have equally many; or the plan says another number.
    """
    if plan.nodes not in (1, nodes):
        raise LayoutError(
            f"{label}: its `nodes` are {plan.nodes}, but this run is on {nodes}; leave `nodes` out of it, or give "
            "another plan"
        )
    if plan.num_ranks % nodes:
        raise LayoutError(
            f"{label}: {plan.num_ranks} ranks cannot be divided among the {nodes} nodes of this run, equally many on "
            f"each; set `devices`, or `num_ranks` of a plan file, to a multiple of {nodes}"
        )
    return replace(plan, nodes=nodes)


def on_cluster(plan: Plan, cluster: ClusterSpec, label: str) -> Plan:
    """A plan of all devices of a cluster, on its nodes.

    Raises:
        ConfigError: it has more or fewer ranks, or is on another number of nodes.
    """
    where = f"but the cluster `{cluster.name}` has"
    if plan.num_ranks != cluster.num_devices:
        raise ConfigError(
            f"{label}: its `num_ranks` are {plan.num_ranks}, {where} {cluster.num_devices} devices; give "
            f"--devices {plan.num_ranks}, another --cluster, or another plan"
        )
    if plan.nodes not in (1, cluster.nodes):
        raise ConfigError(
            f"{label}: its `nodes` are {plan.nodes}, {where} {cluster.nodes}; give another --cluster, or leave `nodes` "
            "out of the plan"
        )
    return on_nodes(plan, cluster.nodes, label)


def planned_models(
    recipe: Recipe, models: Sequence[RoleModel], shapes: Mapping[str, ModelShape]
) -> dict[str, PlannedModel]:
    """By the role."""
    planned = {}
    for model in models:
        shape = shapes[model.name]
        head = shape.head_in_layers(1 if model.scalar else shape.vocabulary)
        work = ModelWork(shape, "bfloat16", 1)
        pair_tokens = work.attention(1) / work.products(1)
        shards = model.trained and optimizer_of(model.role, recipe).shard_weights
        owner = ("base", model.name, model.has_head) if recipe.lora.rank > 0 else ()
        planned[model.role] = PlannedModel(
            model.scalar, shape.parameters, shape.layers, head, pair_tokens, shards, owner
        )
    return planned


def check_layouts(plan: Plan, parameters: Mapping[str, Parameters], label: str) -> None:
    """Raises LayoutError, which begins with `label`, where a role's model (by the role) or the devices do not allow a
    layout of a completed plan."""
    cluster = plan.cluster
    for role, own in parameters.items():
        placement, mode = placements_of(plan, role), "train"
        try:
            if placement.train is not None:
                check(own, placement.train, cluster)
            mode = "score"
            if placement.score is not None:
                check(own, placement.score, cluster)
            mode = "decode"
            check_instances(own, placement.generate, cluster)
        except LayoutError as error:
            raise LayoutError(f"{label}: {role} {mode}: {error}") from error


def _from_file(recipe: Recipe) -> Plan:
    """The plan as it stands, without what was predicted of it: for another batch or machine perhaps, or before an
    edit."""
    plan = replace(plan_file(recipe.plan), predicted=None)
    if recipe.devices not in (0, plan.num_ranks):
        raise ConfigError(
            f"`devices` is {recipe.devices}, but `num_ranks` of the plan `{recipe.plan}` is {plan.num_ranks}; leave "
            "`devices` out where the plan is a file"
        )
    return plan


def num_devices(recipe: Recipe) -> int:
    """Devices of a named plan, or of one that is found."""
    if recipe.devices == 0 and recipe.device == "cuda":
        import torch

        return max(1, torch.cuda.device_count())
    return max(1, recipe.devices)


def check_devices(recipe: Recipe, plan: Plan, nodes: int) -> None:
    """Raises ConfigError where this machine has too few; those of others are counted where they join, or by Ray."""
    here = nodes == 1 and recipe.launcher != "ray"
    if recipe.device == "cuda" and plan.num_ranks > 1 and here:
        import torch

        if (count := torch.cuda.device_count()) < plan.num_ranks:
            raise ConfigError(
                f"the plan `{recipe.plan}` needs {plan.num_ranks} devices, but torch finds {count} (key `devices`, or "
                "`num_ranks` of a plan file)"
            )


def check_plan(
    recipe: Recipe, plan: Plan, models: Sequence[RoleModel], shapes: Mapping[str, ModelShape], label: str
) -> None:
    """Raises ConfigError where a completed plan and the recipe, or a model, do not go together. Begins with `label`
    where the plan is what can be changed."""
    _check_adapters(recipe, plan, label)
    check_shares(recipe, plan, label)
    check_prompts(plan, models, shapes, label)
    _check_exact(recipe, plan, models, label)
    _check_prefill(recipe, plan, label)
    _check_parted(recipe, plan, models, label)


def _check_adapters(recipe: Recipe, plan: Plan, label: str) -> None:
    if recipe.lora.rank > 0 and (dropped := next((p for p in plan.placements if p.after == "drop"), None)):
        raise ConfigError(
            f"{label}: {dropped.call} {dropped.mode}: `after` drop cannot bring back the weights under the adapters "
            f"(`lora.rank` {recipe.lora.rank}); take offload, or keep"
        )


def _check_exact(recipe: Recipe, plan: Plan, models: Sequence[RoleModel], label: str) -> None:
    for model in models if recipe.sampling.exact else ():
        tp = max((instance.parallelism.tp for instance in placements_of(plan, model.role).generate), default=1)
        if tp > 1:
            raise ConfigError(
                f"`sampling.exact` needs unsharded layers, as sums over ranks round differently, but instances of the "
                f"{model.role} have tp {tp} in {label}; set tp of its generation to 1 (pp may be more), "
                "or leave `sampling.exact` out"
            )


def _check_parted(recipe: Recipe, plan: Plan, models: Sequence[RoleModel], label: str) -> None:
    """Raises ConfigError, which begins with `label`, where tokens are to be sharded between layers that need all."""
    cut = [p for p in plan.placements if p.mode == "train" and p.tp > 1] if recipe.sequence_parallel else []
    for placement in cut:
        model = next(model for model in models if model.role == placement.role)
        if why := needs_all_tokens(model):
            raise ConfigError(
                f"{label}: {placement.call} has tp {placement.tp}, but `sequence_parallel` is true and {why}; set "
                "`sequence_parallel` to false, or tp to 1 (pp may be more)"
            )


def _check_prefill(recipe: Recipe, plan: Plan, label: str) -> None:
    apart = next((p for p in plan.placements if p.mode == "prefill"), None)
    if apart is not None and not recipe.update_rule.waits:
        raise ConfigError(
            f"{label}: {apart.call} computes its prompts on other ranks (`mode` prefill) than its samples, but "
            f"`partial_rollout` is {recipe.partial_rollout}: prompts that are being sent cannot stop for new weights; "
            "set `partial_rollout` to off, or leave prefill out of the plan"
        )


def with_room(flow: Dataflow, planned: Mapping[str, PlannedModel], placed: Placed, device_bytes: float) -> Plan:
    """The named plan with the least tp whose parameters leave room on every device; the plan of `placed` itself where
    none does.

    Args:
        placed: its plan is a named one, with tp 1.
        device_bytes: memory of a device.
    """
    plan = candidate = placed.plan
    per_node, tp = plan.cluster.devices, 1
    while tp <= per_node:
        tried = replace(placed, plan=candidate)
        held = (sum(count for _, count in parameter_rows(ranks[0], tried)) for ranks in tried.alike)
        if all(num_bytes <= PARAMETERS_SHARE * device_bytes for num_bytes in held):
            return candidate
        tp *= 2
        candidate = replace(named_plan(plan.name, flow, planned, plan.num_ranks, tp=tp), nodes=plan.nodes)
        candidate = with_shares(candidate, planned)
        try:
            check_layouts(candidate, placed.parameters, "")
        except LayoutError:
            break
    return plan


def device_bytes_if_here(recipe: Recipe, devices: int) -> int | None:
    """`device_bytes`; None where the recipe is for GPUs and this machine has none."""
    if recipe.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            return None
    return device_bytes(recipe, devices)


def device_bytes(recipe: Recipe, devices: int) -> int:
    """Memory of one device; of the CPU, an equal part of the machine's, or of the control group's that bounds it. Its
    size, not what is free: a plan does not depend on what else runs."""
    if recipe.device == "cuda":
        import torch

        return torch.cuda.get_device_properties(0).total_memory
    return limit().bytes // devices
