"""The records of a dataflow graph. A node is one call; an edge is a column that one call makes and another reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


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
    SCORE = "score"
    TRAIN = "train"
    COMPUTE = "compute"
    """A pure function over columns, run where the rows live."""


class Level(StrEnum):
    """What a column holds one number for."""

    SAMPLE = "sample"
    TOKEN = "token"
    """One number per response token."""


@dataclass(frozen=True)
class Column:
    """A named value of the graph: one number per sample or per response token of the rows that node `rows` made."""

    name: str
    level: Level
    producer: int
    rows: int

    def __str__(self) -> str:
        return f"{self.name}[{self.level}]"


@dataclass(frozen=True)
class Node:
    """One call. `call` is unique within the graph, such as `actor.generate` or `ref.logprobs`."""

    id: int
    call: str
    kind: CallKind
    grain: Grain
    role: str | None
    rows: int
    """Id of the GENERATE node whose samples this call reads; its own id for a GENERATE node."""
    inputs: Mapping[str, Column] = field(default_factory=dict)
    """Argument name → column."""
    outputs: tuple[Column, ...] = ()
    fn: Callable[..., Any] | None = None
    """The loss of a TRAIN node, the function of a COMPUTE node."""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Dataflow:
    """The graph of one training step, nodes in an order in which they can run."""

    name: str
    nodes: tuple[Node, ...]

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the roles that the flow calls, in order of first use."""
        return tuple(dict.fromkeys(node.role for node in self.nodes if node.role is not None))

    def calls(self, role: str) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.role == role)

    def optimizer_steps(self, role: str) -> int:
        """Optimizer steps of a role in one training step."""
        trained = [node for node in self.calls(role) if node.kind is CallKind.TRAIN]
        return sum(node.options["mini_batches"] * node.options["epochs"] for node in trained)

    def __str__(self) -> str:
        """One line per node: `3 ref.logprobs  per sample  (0) -> ref_logprobs[token]`."""
        lines = []
        for node in self.nodes:
            sources = ", ".join(f"{name}={column.producer}" for name, column in node.inputs.items()) or str(node.rows)
            made = ", ".join(str(column) for column in node.outputs) or "weights"
            lines.append(f"{node.id} {node.call}  per {node.grain}  ({sources}) -> {made}")
        return "\n".join(lines)
