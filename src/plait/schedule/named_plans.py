"""Plans by name, for any flow and any number of devices.

* colocated: every call of every model on all devices, one copy of the model on each.
* split: two meshes. What speaks (actor, reference, judge) on one half, what gives numbers (critics, reward and cost
  models) on the other; where a flow has only one of the two kinds, generation and frozen models on one half, what is
  trained on the other: the leader is among those whose actions are short, and so it answers soon. HybridFlow's split
  (Sheng et al. 2024, arXiv 2409.19256, section 8.3).
* standalone: every model on a mesh of its own, devices by the work that each has. HybridFlow's standalone, ibidem.

Data parallel inside each mesh: `tp` devices form one copy where a model needs more than one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from plait.dataflow import CallKind, Dataflow, Node
from plait.errors import ConfigError
from plait.schedule.plan import Mode, Placement, Plan

NAMES = ("colocated", "split", "standalone")

BASELINES = {"one-mesh": "one mesh", "real": "ReaL heuristic", "hybridflow": "HybridFlow"}
"""Plans that others would make (`planner.plan_baselines`): the word by which a user asks for one, and its title."""

AUTO = "auto"
"""In place of a name: the plan is found before the run."""

MODE_OF: Mapping[CallKind, Mode] = {CallKind.GENERATE: "decode", CallKind.SCORE: "score", CallKind.TRAIN: "train"}
"""What a call of a model is placed as; prefill runs where decode does unless a plan says otherwise."""

_PASSES = {CallKind.GENERATE: 3, CallKind.SCORE: 1, CallKind.TRAIN: 3}
"""Forwards that a call takes about as long as: a backward is two, decoding reads all weights for few tokens."""


@dataclass(frozen=True)
class PlannedModel:
    """What plans know of the model of a role."""

    scalar: bool
    """It gives numbers: critic, reward or cost model."""
    num_elements: int = 1
    """Its parameters, for the share of devices."""
    layers: int = 0
    """Number of layers, to divide them into pipeline stages where the plan does not; 0: not known, so as equally as
    possible."""
    head_in_layers: float = 0.0
    """What its head is worth of them, as of `ModelShape.head_in_layers`."""
    pair_tokens: float = 0.0
    """What a pair of a query and a key takes in its layers, in tokens."""
    shards_weights: bool = False
    """Whether ranks of dp that train it share its weights (`optimizer.shard_weights`)."""
    owner: tuple[str | bool, ...] = ()
    """Whose weights it has: equal for roles that share some while they are trained; empty: it shares none."""


@dataclass(frozen=True)
class Cut:
    """How a user has the models of a named plan cut: what trains or scores, and what generates.

    Weights of a trained role that generate in a cut of their own are given back while other calls run, as HybridFlow's
    are.

    offload: optimizer states are in host memory while other calls run
    """

    tp: int = 1
    pp: int = 1
    decode_tp: int = 1
    offload: bool = False

    def __post_init__(self) -> None:
        assert min(self.tp, self.pp, self.decode_tp) >= 1, f"sizes are at least 1: {self}"

    def placement(self, node: Node, ranks: tuple[int, ...], *, trained: bool) -> Placement:
        """The placement of a call on these ranks, as many as a multiple of `copy`.

        Args:
            trained: whether its role is.
        """
        mode, after, apart = MODE_OF[node.kind], "keep", (self.decode_tp, 1) != (self.tp, self.pp)
        tp, pp = (self.decode_tp, 1) if mode == "decode" else (self.tp, self.pp)
        if mode == "decode" and apart and trained:
            after = "drop"
        elif mode == "train" and self.offload:
            after = "offload"
        return Placement(node.call, mode, ranks, len(ranks) // (tp * pp), tp, pp, after)

    @property
    def copy(self) -> int:
        """The fewest devices that hold whole copies of everything."""
        return lcm(self.tp * self.pp, self.decode_tp)


def model_calls(flow: Dataflow, models: Mapping[str, PlannedModel]) -> tuple[Node, ...]:
    """The calls that are placed: those of roles that are models, in the order of the flow."""
    return tuple(node for node in flow.nodes if node.role in models and node.kind in MODE_OF)


def named_plan(
    name: str,
    flow: Dataflow,
    models: Mapping[str, PlannedModel],
    devices: int,
    *,
    tp: int = 1,
    cut: Cut | None = None,
) -> Plan:
    """The plan of this name, one of NAMES.

    Args:
        models: role → its model, for every role that is one.
        tp: devices of one copy of a model; a mesh that it does not divide takes the next smaller number that does.
        cut: in place of `tp`, for every mesh; devices are dealt out in whole copies.

    Raises:
        ConfigError: there are too few devices, the cut does not divide them, or the flow has nothing to split.
    """
    match name:
        case "colocated":
            parts = [model_calls(flow, models)]
        case "split":
            parts = _halves(flow, models)
        case "standalone":
            parts = [tuple(node for node in model_calls(flow, models) if node.role == role) for role in models]
            parts = [part for part in parts if part]
        case _:
            raise AssertionError(f"no plan has the name {name}")
    unit = 1 if cut is None else cut.copy
    if devices % unit:
        raise ConfigError(f"`plan` {name}: expected a multiple of {unit} `devices`, which hold a copy, found {devices}")
    if devices < unit * len(parts):
        raise ConfigError(
            f"`plan` {name} needs at least {unit * len(parts)} devices for the flow `{flow.name}`, found {devices}; "
            "raise `devices`, or take `colocated`"
        )
    work = [1.0 if name == "split" else _work(part, models) for part in parts]
    placed: dict[int, Placement] = {}
    first = 0
    for part, share in zip(parts, shares(devices // unit, work), strict=True):
        size = unit * share
        ways = next(ways for ways in range(min(tp, size), 0, -1) if size % ways == 0)
        for node in part:
            ranks = tuple(range(first, first + size))
            if cut is not None:
                placed[node.id] = cut.placement(node, ranks, trained=node.role in flow.trained_roles)
            else:
                placed[node.id] = Placement(node.call, MODE_OF[node.kind], ranks, dp=size // ways, tp=ways)
        first += size
    return Plan(name, devices, tuple(placed[number] for number in sorted(placed)))


def shares(devices: int, work: Sequence[float]) -> list[int]:
    """Devices in proportion to `work`, at least one for each, all of them given: those that are left after rounding
    down go where the most work waits for each device, ties to the first."""
    assert len(work) <= devices, "fewer devices than parts"
    total = sum(work)
    counts = [max(1, int(devices * work_of_part / total)) for work_of_part in work]
    while sum(counts) > devices:  # ones for little work were taken from the others
        place = max(range(len(work)), key=lambda i: (counts[i] > 1, -work[i] / counts[i]))
        counts[place] -= 1
    while sum(counts) < devices:
        counts[max(range(len(work)), key=lambda i: (work[i] / counts[i], -i))] += 1
    return counts


def _halves(flow: Dataflow, models: Mapping[str, PlannedModel]) -> list[tuple[Node, ...]]:
    calls = model_calls(flow, models)
    judging = tuple(node for node in calls if models[str(node.role)].scalar)
    if judging and len(judging) < len(calls):
        return [tuple(node for node in calls if node not in judging), judging]
    trained = {node.role for node in calls if node.kind is CallKind.TRAIN}
    learning = tuple(node for node in calls if node.role in trained and node.kind is not CallKind.GENERATE)
    if len(learning) == len(calls):
        raise ConfigError(
            f"`plan` split: the flow `{flow.name}` only trains {' and '.join(sorted(map(str, trained)))}, so there is "
            "nothing to put on other devices; take `colocated`"
        )
    return [tuple(node for node in calls if node not in learning), learning]


def _work(calls: Sequence[Node], models: Mapping[str, PlannedModel]) -> float:
    total = 0.0
    for node in calls:
        passes = _PASSES[node.kind] * (node.training.epochs if node.kind is CallKind.TRAIN else 1)
        total += passes * models[str(node.role)].num_elements
    return total
