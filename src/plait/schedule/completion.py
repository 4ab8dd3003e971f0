"""Where the calls of a flow run: a plan as the user wrote it, completed and checked against the flow.

Enters: a traced flow, which of its roles are models, and a plan. Leaves: a plan in which every call of every model has
its place. What the models allow is checked by `cost.placement`, which knows them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from math import inf

from plait.dataflow import CallKind, CallName, Dataflow, Node
from plait.dataflow.unfit import nearest
from plait.errors import ConfigError, DataError
from plait.layout.shards import balanced_stages
from plait.schedule.fused import FUSED, shared_rows
from plait.schedule.fusion_times import FusionTimes
from plait.schedule.joint_training import check_calls
from plait.schedule.named_plans import MODE_OF, PlannedModel, model_calls
from plait.schedule.placements import is_fused, orders_of, parts_of, to_be_found
from plait.schedule.plan import FUSION, POOL, SEVERAL, SHARES, Mode, Placement, Plan, PolicyChoice
from plait.schedule.schedule import Schedule
from plait.schedule.training_order import SCHEDULES, is_by_rule

EVALUATED = "actor"
"""The role that answers held-out prompts."""

EVALUATE = f"{EVALUATED}.evaluate"
"""Its place in a plan, where no call of the flow has it generate."""


def complete(plan: Plan, flow: Dataflow, models: Mapping[str, PlannedModel], label: str) -> Plan:
    """A plan in which every call of every model is placed, in the order of the flow, and which can be run.

    A call that the plan does not name runs as other calls of the same role do: one of the same mode, or else where the
    role trains, scores or generates, the first of these that is named. A role that is not named at all is on all ranks,
    data parallel. A name without its number (`actor.logprobs`) holds for all such calls that are not named themselves.
    Pipeline stages whose layers the plan does not state get equal work (`layout.shards.balanced_stages`). Prompts are
    computed where samples are drawn, and then have no placement of their own, unless the plan says otherwise.

    Args:
        models: role → its model, for every role that is one.
        label: the plan in messages.

    Raises:
        ConfigError: names a placement and its key: the call or mode is unknown, a key does not fit the mode, calls of
            one role contradict each other, a rank has nothing to do, or the plan asks for what no run does yet.
    """
    plan = replace(plan, placements=tuple(replace(p, shards_weights=False) for p in plan.placements))
    calls = model_calls(flow, models)
    for number, placement in enumerate(plan.placements):
        _check_placement(placement, flow, calls, plan.schedules, f"{label}: placements[{number}]")
    _check_schedules(plan, flow, label)
    if together := to_be_found(plan):
        try:
            shared_rows(together)
            check_calls(flow, tuple(together))
        except (DataError, ConfigError) as error:
            calls_of = " and ".join(p.call for p in together.values())
            raise ConfigError(f"{label}: `schedule` {FUSED} of {calls_of}: {error}") from error
    policies = tuple(_completed_policy(policy, models, f"{label}: `policies`") for policy in plan.policies)
    placed = [p for node in calls for p in (*_prefilled(node, plan, calls, label), *_placed(node, plan, calls))]
    placements = tuple(_divided(p, models[p.role]) for p in placed)
    if _is_evaluated_apart(flow, calls):
        placements += plan.placements_of(EVALUATE, "decode") or _where_trained(placements)
    whole = with_shares(replace(plan, placements=placements, policies=policies), models)
    _check_roles(whole.placements, label)
    used = {rank for p in placements for rank in p.ranks}
    idle = [rank for rank in range(plan.num_ranks) if rank not in used]
    if idle:
        raise ConfigError(f"{label}: rank {idle[0]} has nothing to do; lower `num_ranks`, or place a call on it")
    return whole


def with_shares(plan: Plan, models: Mapping[str, PlannedModel]) -> Plan:
    """A plan whose calls all have their place, with what computes with weights that ranks of dp share: training that is
    to, and scoring on the same ranks in the same way. Where they have these weights whole to generate, it takes those.

    Args:
        models: as of `complete`.
    """
    whose = {role: model.owner or (role,) for role, model in models.items()}
    shares = sharing(plan.placements, whose, {role for role, model in models.items() if model.shards_weights})
    return replace(
        plan, placements=tuple(replace(p, shards_weights=s) for p, s in zip(plan.placements, shares, strict=True))
    )


def sharing(placements: Sequence[Placement], whose: Mapping[str, Hashable], sharded: Collection[str]) -> list[bool]:
    """Whether each placement of a plan computes with weights that ranks of dp share (`with_shares`).

    Args:
        whose: role → whose weights it computes with.
        sharded: roles that are trained so.
    """
    trained = {(whose[p.role], _sizes(p)) for p in placements if p.mode == "train" and p.role in sharded}
    mine = [p.dp > 1 and p.mode not in SEVERAL and (whose[p.role], _sizes(p)) in trained for p in placements]
    if not any(is_mine and p.mode == "score" for p, is_mine in zip(placements, mine, strict=True)):
        return mine
    generated = {(whose[p.role], part) for p in placements if p.mode in SEVERAL for part in parts_of(p.layout)}

    def is_whole(p: Placement) -> bool:
        return all((whose[p.role], part) in generated for part in parts_of(p.layout.whole))

    return [is_mine and (p.mode == "train" or not is_whole(p)) for p, is_mine in zip(placements, mine, strict=True)]


def _sizes(p: Placement) -> tuple[object, ...]:
    return p.ranks, p.dp, p.tp, p.pp, p.stages


def _completed_policy(policy: PolicyChoice, models: Mapping[str, PlannedModel], label: str) -> PolicyChoice:
    """With settings for all models. Raises ConfigError."""
    if policy.name == FUSION:
        if policy.settings:
            FusionTimes.of(policy.settings, f"{label}: settings of `{FUSION}`")
        return policy
    if policy.name == POOL:
        if policy.settings:
            raise ConfigError(f"{label}: settings of `{POOL}`: expected none, found `{policy.settings[0][0]}`")
        return policy
    if policy.name != SHARES:
        raise ConfigError(f"{label}: expected `{FUSION}`, `{POOL}`, `{SHARES}`, or none, found `{policy.name}`")
    stated = dict(policy.settings)
    for role, value in stated.items():
        if role not in models:
            raise ConfigError(f"{label}: settings of `{SHARES}`: expected roles {', '.join(models)}, found `{role}`")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
            raise ConfigError(f"{label}: `{SHARES}` of {role}: expected a number from 0 on, found {value!r}")
    return replace(
        policy, settings=tuple((role, stated.get(role, model.pair_tokens)) for role, model in models.items())
    )


def _is_evaluated_apart(flow: Dataflow, calls: Sequence[Node]) -> bool:
    """Whether the actor answers held-out prompts, but generates for no call of the flow."""
    kinds = {node.kind for node in calls if node.role == EVALUATED}
    return bool(kinds) and CallKind.GENERATE not in kinds and bool(flow.of_kind(CallKind.GENERATE))


def _where_trained(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Placement of EVALUATE, where nothing is said of it: on the layout whose weights are the actor's own."""
    mine = [p for mode in ("train", "score") for p in placements if (p.role, p.mode) == (EVALUATED, mode)]
    return (replace(mine[0], call=EVALUATE, mode="decode", after="keep", micro_batch_tokens=None, schedule=""),)


def _check_schedules(plan: Plan, flow: Dataflow, label: str) -> None:
    """Each is followed by a call, and is an order of its pipeline, or of the pipelines of several."""
    for number, schedule in enumerate(plan.schedules):
        where = f"{label}: schedules[{number}]"
        if is_by_rule(schedule.name):
            raise ConfigError(
                f"{where}.name: expected a name of its own, by which a placement's `schedule` names it, found "
                f"`{schedule.name}`"
            )
        followers = [p for p in plan.placements if p.schedule == schedule.name]
        if not followers:
            raise ConfigError(
                f"{where}: no call follows `{schedule.name}`; name it as the `schedule` of a train placement with pp "
                "above 1, or leave it out"
            )
        for group in [followers] if is_fused(schedule) else [[p] for p in followers]:
            try:
                _, together = orders_of(plan, group[0])
                if together is not None:
                    check_calls(flow, together.roles)
            except (DataError, ConfigError) as error:
                follow = f"{' and '.join(p.call for p in group)} follow{'s' if len(group) == 1 else ''}"
                raise ConfigError(f"{where} `{schedule.name}`, which {follow}: {error}") from error


def _check_placement(
    p: Placement, flow: Dataflow, calls: Sequence[Node], stated: Sequence[Schedule], label: str
) -> None:
    """
    Args:
        stated: the schedules that the plan states.
    """
    names = [node.call for node in calls]
    if p.call == EVALUATE and p.mode == "decode" and _is_evaluated_apart(flow, calls):
        return
    node = next((node for node in calls if p.call in (node.call, CallName.of(node.call).plain)), None)
    if node is None:
        if any(p.call == other.call for other in flow.nodes):
            raise ConfigError(
                f"{label}.call: `{p.call}` asks no model, and so is not placed; leave it out. Placed are: "
                f"{', '.join(names)}"
            )
        raise ConfigError(
            f"{label}.call: the flow `{flow.name}` has no call `{p.call}`{nearest(p.call, names)}; "
            f"it has: {', '.join(names)}"
        )
    modes = ("prefill", "decode") if node.kind is CallKind.GENERATE else (MODE_OF[node.kind],)
    if p.mode not in modes:
        raise ConfigError(f"{label}.mode: expected {' or '.join(modes)} for {p.call}, found {p.mode}")
    if p.micro_batch_tokens is not None and p.mode not in ("score", "train"):
        raise ConfigError(f"{label}.micro_batch_tokens: only train and score have micro-batches, found {p.mode}")
    if p.schedule:
        own = next((s for s in stated if s.name == p.schedule), None)
        several = p.schedule == FUSED if own is None else is_fused(own)
        if p.mode != "train" or (p.pp == 1 and not several):
            raise ConfigError(f"{label}.schedule: only train with pp above 1 has a pipeline schedule; leave it out")
        names_of_all = (*SCHEDULES, FUSED, *(schedule.name for schedule in stated))
        if p.schedule not in names_of_all:
            raise ConfigError(
                f"{label}.schedule: expected {', '.join(SCHEDULES)}, {FUSED} or a name in `schedules`, found "
                f"`{p.schedule}`{nearest(p.schedule, names_of_all)}"
            )


def _placed(node: Node, plan: Plan, calls: Sequence[Node]) -> tuple[Placement, ...]:
    """The placements of a call, its own or another's that stands for it."""
    mode = MODE_OF[node.kind]
    if placements := _named(node, mode, plan, calls):
        return placements
    for other in ("train", "score", "decode"):
        placements = tuple(p for p in plan.placements if p.mode == other and p.role == node.role)
        if placements and (len(placements) == 1 or mode == "decode"):
            first = tuple(p for p in placements if p.call == placements[0].call)
            plain = {"call": node.call, "mode": mode, "after": "keep", "micro_batch_tokens": None, "schedule": ""}
            return tuple(replace(p, **plain) for p in first)
    return (Placement(node.call, mode, tuple(range(plan.num_ranks)), dp=plan.num_ranks),)


def _named(node: Node, mode: Mode, plan: Plan, calls: Sequence[Node]) -> tuple[Placement, ...]:
    """The placements of a mode that the plan has for a call, or else for another of the same kind and role."""
    names = [node.call, CallName.of(node.call).plain]
    names += [other.call for other in calls if other.role == node.role and other.kind is node.kind]
    stated = (plan.placements_of(name, mode) for name in dict.fromkeys(names))
    return tuple(replace(p, call=node.call) for p in next(filter(None, stated), ()))


def _prefilled(node: Node, plan: Plan, calls: Sequence[Node], label: str) -> tuple[Placement, ...]:
    """Where the prompts of a call are computed, if that is not where its samples are drawn.

    Raises:
        ConfigError: a rank would do both.
    """
    stated = _named(node, "prefill", plan, calls) if node.kind is CallKind.GENERATE else ()
    drawing = _placed(node, plan, calls)
    if {(p.ranks, p.dp, p.tp, p.pp, p.stages) for p in stated} == {
        (p.ranks, p.dp, p.tp, p.pp, p.stages) for p in drawing
    }:
        if away := next((p for p in stated if p.after != "keep"), None):
            raise ConfigError(
                f"{label}: {node.call} prefill: `after`: prefill and decode have one copy; set `after: {away.after}` "
                "in decode"
            )
        return ()
    both = sorted({rank for p in stated for rank in p.ranks} & {rank for p in drawing for rank in p.ranks})
    if both:
        raise ConfigError(
            f"{label}: {node.call}: expected prefill on other ranks than decode, or on the same in the same layout, "
            f"found rank {both[0]} in both, which would need its weights and a pool of keys and values twice; give "
            "prefill ranks of its own, or leave it out"
        )
    return stated


def _divided(p: Placement, model: PlannedModel) -> Placement:
    """With the layers of each stage; as it is where the plan states them, or the model has too few (refused later)."""
    if p.pp == 1 or p.stages or p.pp > model.layers:
        return p
    return replace(p, stages=balanced_stages(model.layers, p.pp, model.head_in_layers))


def _check_roles(placements: Sequence[Placement], label: str) -> None:
    """A role trains, scores and generates in one way each, and its weights always have a place."""
    first: dict[tuple[str, Mode], tuple[str, tuple[Placement, ...]]] = {}
    for p in placements:
        role = p.role
        mine = tuple(replace(q, call=role) for q in placements if (q.call, q.mode) == (p.call, p.mode))
        other, theirs = first.setdefault((role, p.mode), (p.call, mine))
        if mine != theirs:
            raise ConfigError(f"{label}: {other} and {p.call} are of one model, expected equal placements of {p.mode}")
    homes: dict[str, Placement] = {}
    for mode in ("train", "score", "decode"):
        for p in placements:
            if p.mode == mode:
                homes.setdefault(p.role, p)
    for p in placements:
        home = homes[p.role]
        if p.after == "drop" and (p.mode == home.mode or parts_of(p.layout) <= parts_of(home.layout)):
            raise ConfigError(
                f"{label}: {p.call} {p.mode}: `after` drop would lose the only weights of the role; take offload, or "
                "keep"
            )
