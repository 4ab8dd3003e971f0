"""What a prediction asks of a cost model: seconds and bytes of calls and moves, on a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from plait.cost.generation_memory import EngineBytes
from plait.layout.mesh import Cluster, Layout
from plait.schedule.plan import Mode

Floats = NDArray[np.float64]


class ForetoldTail(Protocol):
    """One way in which a generation may end (`cost.costs.Tail`)."""

    @property
    def end_s(self) -> float: ...

    @property
    def idle_s(self) -> float:
        """Instance seconds until then in which instances have no samples left."""
        ...

    @property
    def move_s(self) -> float:
        """In which samples stand still that are gathered."""
        ...


class ForetoldCall(Protocol):
    """What one call of a step is foretold to take (`cost.costs.CallCost`)."""

    @property
    def seconds(self) -> float: ...

    @property
    def terms(self) -> Mapping[str, float]:
        """What they are spent on; they sum to `seconds`."""
        ...

    @property
    def bytes(self) -> int:
        """That devices send each other."""
        ...

    @property
    def working_bytes(self) -> tuple[int, ...]:
        """By pipeline stage: activations, keys and values, logits of a chunk: what is held while it runs, beside
        weights and optimizer state."""
        ...

    @property
    def activation_bytes(self) -> tuple[int, ...]:
        """What forwards keep of these."""
        ...

    @property
    def plain_bytes(self) -> tuple[int, ...]:
        """These, where the layers of the family are not fused."""
        ...

    @property
    def widened_bytes(self) -> int:
        """More than `working_bytes` of a generation, where packed weights are widened."""
        ...

    @property
    def first_s(self) -> float:
        """When the first prompts of a generation have all their samples."""
        ...

    @property
    def in_parts_s(self) -> float:
        """More than `seconds`, where samples are scored in parts by ranks that have none left to generate."""
        ...

    @property
    def tails(self) -> Sequence[ForetoldTail]:
        """The ways in which a generation by several instances may end; `seconds` is of the first."""
        ...


class ForetoldMove(Protocol):
    """What weights or optimizer state are foretold to take on their way: between layouts, or to or from host memory
    (`cost.costs.MoveCost`)."""

    @property
    def seconds(self) -> float: ...

    @property
    def bytes(self) -> int: ...


class Devices(Protocol):
    """What calls run on: devices in nodes, those of a node alike."""

    @property
    def mesh_cluster(self) -> Cluster: ...

    def memory_of(self, rank: int) -> int:
        """Bytes of a rank's device."""
        ...

    def kinds_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The kind of each node that these ranks, which follow each other, are on; empty where all nodes are alike."""
        ...


class CostSource(Protocol):
    """Answers are kept by who gives them: a search asks for the same ones again and again."""

    @property
    def cluster(self) -> Devices: ...

    @property
    def process_terms(self) -> Mapping[str, int]:
        """What a process holds beside models and what calls take, in bytes."""
        ...

    @property
    def keeps_freed(self) -> bool:
        """Whether what activations took stays with a process that generates next."""
        ...

    @property
    def engine_bytes(self) -> EngineBytes:
        """What an engine takes on a rank that generates, beside the models of roles: all the time, and what may come to
        it."""
        ...

    @property
    def engine_is_whole(self) -> bool:
        """Whether it takes that only where an instance is of one rank."""
        ...

    def slack(
        self, *, activations: Floats, plain: Floats, weights: Floats, working: Floats, moves: bool, widened: Floats
    ) -> Mapping[str, Floats | int]:
        """What ranks may hold on top of what is expected.

        Args:
            activations: [ranks] of the largest micro-batch; plain: of a family whose layers are not fused.
            weights: [ranks] of the largest model.
            working: [ranks] what the fullest moment of a step takes beyond that in which all models have been read.
            moves: whether weights are moved, or leave devices.
            widened: [ranks] what the fullest moment grows by if packed weights are widened.
        """
        ...

    def call(
        self, call: str, mode: Mode, layout: Layout, *, micro_batch_tokens: int | None = None, schedule: str = ""
    ) -> ForetoldCall:
        """
        Args:
            micro_batch_tokens: None: the recipe's.
            schedule: of the pipeline; empty: 1F1B.
        """
        ...

    @property
    def pool_takes_rest(self) -> bool:
        """Whether the keys and values of a generation have what nothing else on a device takes."""
        ...

    def generation(self, call: str, layout: Layout, held_bytes: int) -> ForetoldCall:
        """As `call` in `decode`, where the pool takes what is left.

        Args:
            held_bytes: weights, these among them, and optimizer state on the device with most of them.
        """
        ...

    def move(self, role: str, source: Layout, target: Layout) -> ForetoldMove:
        """What a move of a role's weights takes."""
        ...

    def offload(self, role: str, layout: Layout, what: Literal["weights", "state"]) -> ForetoldMove:
        """To host memory; the way back takes as long."""
        ...

    def held_bytes(self, role: str, layout: Layout, *, trained: bool) -> tuple[int, ...]:
        """By pipeline stage: a rank's weights, and with `trained` masters, moments and gradients."""
        ...
