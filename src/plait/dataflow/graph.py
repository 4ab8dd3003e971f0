"""The records of a dataflow graph. A node is one call; an edge is a column that one call makes and another reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from plait.dataflow.options import (
    Asked,
    BecomesOptions,
    CarriedOptions,
    ComputeOptions,
    GenerateOptions,
    Options,
    ScoreOptions,
    TextOptions,
    TrainOptions,
)

KEEP, MASK, VALUE = "keep", "mask", "value"
"""Inputs that a node asks for by `Node.keep`, `Node.mask` and `Node.next_value`, not by these names."""


class Grain(StrEnum):
    """How much of the batch a node needs before a part of its work can start."""

    SAMPLE = "sample"
    """Each sample by itself: generation, scores, values, log-probs."""
    GROUP = "group"
    """All samples of one prompt: group baselines."""
    BATCH = "batch"
    """A barrier: whitening, mini-batch draws, training."""


class CallKind(StrEnum):
    GENERATE = "generate"
    READ = "read"
    """Given samples of the data set: examples, pairs of a chosen and a rejected one, or labelled responses, with or
    without those that are made of these (`mismatched`)."""
    SCORE = "score"
    TRAIN = "train"
    COMPUTE = "compute"
    """A pure function over columns, run where the rows live."""
    PROMPT = "prompt"
    """A pure function that writes another prompt for each sample, run where the rows live."""
    GRADE = "grade"
    """A pure function that reads a number from the texts of each sample, run where the rows live."""
    CARRIED = "carried"
    """A value kept from step to step, as it is in this step."""
    BECOMES = "becomes"
    """What a carried value is in the next step."""


class Level(StrEnum):
    """What a column holds one number for."""

    SAMPLE = "sample"
    TOKEN = "token"
    """One number per response token, or as many as the column is wide."""
    BATCH = "batch"
    """One number, or an array of a fixed shape, for the whole batch."""


@dataclass(frozen=True)
class Column:
    """A named value of the graph: one number per sample or per response token of the rows that node `rows` made, or
    one for the whole batch, which belongs to no rows (`rows` is then its producer)."""

    name: str
    level: Level
    producer: int
    rows: int
    width: int | None = None
    """Numbers per response token, in a row of an array; None: one, without an array."""

    def __str__(self) -> str:
        return f"{self.name}[{self.level}{'' if self.width is None else f' × {self.width}'}]"

    @property
    def numbers(self) -> int:
        """How many numbers stand for one token, one sample or the batch."""
        return 1 if self.width is None else self.width


@dataclass(frozen=True)
class Node:
    """One call. `call` is unique within the graph, such as `actor.generate` or `ref.logprobs`."""

    id: int
    call: str
    kind: CallKind
    grain: Grain
    role: str | None
    rows: int
    """Id of the GENERATE or READ node whose samples this call reads; its own id for such a node, and for one that reads
    no samples."""
    inputs: Mapping[str, Column] = field(default_factory=dict)
    """Argument name → column: all that it reads, in the order in which the flow gives them. A SCORE node reads what
    other models scored with it, which it needs by its end alone. A PROMPT node writes prompts, which are no column."""
    outputs: tuple[Column, ...] = ()
    fn: Callable[..., Any] | None = None
    """The loss of a TRAIN node, the function of a COMPUTE, PROMPT or GRADE node."""
    options: Options | None = None
    """By its kind: `GenerateOptions` of a GENERATE node, and so on. None: the kind has none (READ)."""

    @property
    def generation(self) -> GenerateOptions:
        """How a GENERATE node generates."""
        assert isinstance(self.options, GenerateOptions), f"{self.call} is no GENERATE node"
        return self.options

    @property
    def scoring(self) -> Asked:
        """What a SCORE node asks its role for."""
        assert isinstance(self.options, ScoreOptions), f"{self.call} is no SCORE node"
        return self.options.what

    @property
    def prompts(self) -> int | None:
        """Id of the PROMPT node whose prompts it reads: a SCORE node scores responses behind them, a GENERATE node
        answers them. None: it reads those that the samples have, or those of the step."""
        return self.options.prompts if isinstance(self.options, ScoreOptions | GenerateOptions) else None

    @property
    def training(self) -> TrainOptions:
        """How a TRAIN node trains."""
        assert isinstance(self.options, TrainOptions), f"{self.call} is no TRAIN node"
        return self.options

    @property
    def computing(self) -> ComputeOptions:
        """How the function of a COMPUTE node is called."""
        assert isinstance(self.options, ComputeOptions), f"{self.call} is no COMPUTE node"
        return self.options

    @property
    def start(self) -> float | tuple[float, ...]:
        """The value of a CARRIED node in the first step."""
        assert isinstance(self.options, CarriedOptions), f"{self.call} is no CARRIED node"
        return self.options.start

    @property
    def carried(self) -> int:
        """Id of the CARRIED node whose next value a BECOMES node makes."""
        assert isinstance(self.options, BecomesOptions), f"{self.call} is no BECOMES node"
        return self.options.carried

    @property
    def keep(self) -> Column | None:
        """A TRAIN node's: samples for which it is 0 take no part. None: all do."""
        return self._of_training(KEEP)

    @property
    def mask(self) -> Column | None:
        """A TRAIN node's: response tokens for which it is 0 take no part. None: all do."""
        return self._of_training(MASK)

    @property
    def loss_columns(self) -> Mapping[str, Column]:
        """What the loss of a TRAIN node is given, by the names of its parameters."""
        assert self.kind is CallKind.TRAIN, f"{self.call} is no TRAIN node"
        return {name: column for name, column in self.inputs.items() if name not in (KEEP, MASK)}

    @property
    def next_value(self) -> Column:
        """What a BECOMES node makes of a carried value."""
        assert self.kind is CallKind.BECOMES, f"{self.call} is no BECOMES node"
        return self.inputs[VALUE]

    def _of_training(self, name: str) -> Column | None:
        assert self.kind is CallKind.TRAIN, f"{self.call} is no TRAIN node"
        return self.inputs.get(name)

    @property
    def asks(self) -> str:
        """What a call asks of its role: `generate`, `train`, or the name of what it scores by."""
        return (self.scoring if self.kind is CallKind.SCORE else self.kind).value


def texts_of(node: Node) -> dict[str, int]:
    """See `TextOptions`; none of another kind."""
    return dict(node.options.texts) if isinstance(node.options, TextOptions) else {}


def _made_without_columns(node: Node) -> str:
    """What a call makes that has no columns, in a word."""
    if node.kind is CallKind.PROMPT:
        return "prompts"
    return "gradients" if node.kind is CallKind.TRAIN and node.training.with_next else "weights"


def added_scores(node: Node) -> dict[str, int]:
    """Name of the scores of a further model → id of the call that makes them, for those that a SCORE node adds to its
    own. They may be computed beside it."""
    return {name: column.producer for name, column in node.inputs.items()} if node.kind is CallKind.SCORE else {}


def scores_alone(node: Node) -> dict[str, Column]:
    """Name of a reward function → the column of its scores alone, for those that a flow asks a SCORE node for."""
    further = ((column.name.partition("/"), column) for column in node.outputs[1:])
    return {name: column for (_, of_one, name), column in further if of_one}


def scores_decoupled(node: Node) -> Column | None:
    """The column of what a SCORE node gives with its functions standardised one by one; None: the flow does not ask."""
    further = (column for column in node.outputs[1:] if column.level is Level.SAMPLE)
    return next((column for column in further if "/" not in column.name), None)


def scores_by_turn(node: Node) -> Column | None:
    """The column of what a SCORE node gives each turn; None: the flow does not ask for it."""
    further = (column for column in node.outputs[1:] if column.level is Level.TOKEN)
    return next((column for column in further if column.width is None), None)


@dataclass(frozen=True)
class Dataflow:
    """The graph of one training step, nodes in an order in which they can run."""

    name: str
    nodes: tuple[Node, ...]
    unread: tuple[str, ...] = ()
    """Names of options that a flow of the user's has not read, nor kept for its loss to read."""
    options: Any = None
    """What the flow was traced with; None: it takes no options."""
    teachers: frozenset[str] = frozenset()
    """Names of the roles that another one learns from (`Role.teaches`)."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the roles that the flow calls, in order of first use."""
        return tuple(dict.fromkeys(node.role for node in self.nodes if node.role is not None))

    def calls(self, role: str) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.role == role)

    def of_kind(self, kind: CallKind) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.kind is kind)

    def rollout_name(self, node: Node) -> str:
        """What tells the samples of this node from those of others; empty where the flow has samples of one alone."""
        return node.call if len(self.of_kind(CallKind.GENERATE) + self.of_kind(CallKind.READ)) > 1 else ""

    @property
    def of_step_prompts(self) -> tuple[Node, ...]:
        """The calls that generate from the prompts of the step; others do from prompts that are made of samples."""
        return tuple(node for node in self.of_kind(CallKind.GENERATE) if node.prompts is None)

    @property
    def trained_roles(self) -> frozenset[str]:
        return frozenset(str(node.role) for node in self.of_kind(CallKind.TRAIN))

    @property
    def trained_on(self) -> tuple[Node, ...]:
        """The calls whose samples train a role, rollouts before given samples. What else a flow draws is there to
        compare with."""
        read = {node.rows for node in self.of_kind(CallKind.TRAIN)}
        return tuple(
            node for kind in (CallKind.GENERATE, CallKind.READ) for node in self.of_kind(kind) if node.id in read
        )

    @property
    def main_rows(self) -> Node:
        """The call whose samples metrics without a prefix are of: the first that a role is trained on, a rollout before
        given samples."""
        return self.trained_on[0]

    def call_kinds(self, role: str) -> frozenset[str]:
        """What the flow asks of a role, see `Node.asks`."""
        return frozenset(node.asks for node in self.calls(role))

    def updates(self, role: str) -> tuple[tuple[Node, ...], ...]:
        """The training calls of a role, those together whose gradients meet in the same optimizer steps."""
        updates: list[tuple[Node, ...]] = []
        meeting: tuple[Node, ...] = ()
        for node in (node for node in self.calls(role) if node.kind is CallKind.TRAIN):
            meeting += (node,)
            if not node.training.with_next:
                updates.append(meeting)
                meeting = ()
        assert not meeting, f"{meeting[-1].call} leaves its gradients to a call that is not there"
        return tuple(updates)

    def optimizer_steps(self, role: str, steps: int = 1) -> int:
        """Optimizer steps of a role in the first `steps` training steps."""
        trained = (node for node in self.calls(role) if node.kind is CallKind.TRAIN)
        return sum(node.training.optimizer_steps(steps) for node in trained)

    def __str__(self) -> str:
        """One line per node: `3 ref.logprobs  per sample  (0) -> ref_logprobs[token]`."""
        lines = []
        for node in self.nodes:
            read = {name: column.producer for name, column in node.inputs.items()}
            read |= ({} if node.prompts is None else {"prompts": node.prompts}) | texts_of(node)
            sources = ", ".join(f"{name}={producer}" for name, producer in read.items()) or str(node.rows)
            made = ", ".join(str(column) for column in node.outputs) or _made_without_columns(node)
            lines.append(f"{node.id} {node.call}  per {node.grain}  ({sources}) -> {made}")
        return "\n".join(lines)
