"""Runs in worker processes: ranks that divide a model generate by steps that are captured and replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from plait.generation import captured_step, prompt_captures
from plait.generation.captured import CapturedSteps
from plait.generation.captured_step import Compute, Size
from plait.generation.cuda_graphs import First, Graph
from plait.generation.fused_layers import FusedLayers
from plait.generation.pool import KVPool
from plait.generation.ragged import RaggedBatch
from plait.generation.request import Request
from plait.models.parallel.stage import is_idle
from tests.generation.replays import Again, capture
from tests.workers.ring_runs import all_at_once, engine_on
from tests.workers.said import Said

AS_CLOSE = {**captured_step.CLOSE, torch.float64: 1e-9}
"""Models are in float64 here, as sums over ranks are in another order."""


@dataclass
class Replayed:
    """What one rank has seen."""

    said: Said = field(default_factory=dict)
    left: int = 0
    refusals: dict[str, str] = field(default_factory=dict)
    replays: int = 0
    captures: list[int] = field(default_factory=list)
    """In each rollout."""
    received_bytes: dict[Size, int] = field(default_factory=dict)
    """By a replay of each size."""


@dataclass
class Steps:
    """An engine of this rank, whose steps are replayed."""

    engine: Any
    team: Any
    seen: Replayed = field(default_factory=Replayed)
    moves: int = 0
    """How often something has moved."""
    fails: str = ""
    """What this rank cannot do: "try" fused layers, "capture" a step, or one with "prompts", compute what is "equal" by
    fused layers."""
    way: str = ""
    """By which the last step was computed."""
    has_head: bool = True
    """Whether the last step had one."""

    @classmethod
    def on(cls, worker: Any, sizes: dict[str, int], settings: dict[str, Any], fused: str) -> Steps:
        """Args: fused: what compiles layers; empty: plain layers alone are captured."""
        steps = cls(*engine_on(worker, sizes, settings))
        module = steps.engine.state.forward.module
        for layer in module.model.module.modules():
            if not is_idle(layer):
                vars(layer).pop("forward", None)  # those of a CPU
        module.layers = FusedLayers(module.model.module, fused or "eager")
        ways: dict[str, Compute] = {"fused": steps.by("fused", module.fused)} if fused else {}
        ways["plain"] = steps.by("plain", module.plainly)
        addresses = lambda: (steps.moves, *module.addresses())
        module.takes_chunks = True
        module.captured = CapturedSteps(ways, module.readout, addresses, steps.capture, module.model.team.tp)
        return steps

    def by(self, way: str, compute: Compute) -> Compute:
        """A way to compute a step, which is noted."""

        def computed(batch: RaggedBatch, pool: KVPool) -> Tensor | None:
            self.way, self.has_head = way, batch.has_head
            if self.fails == "try" and way == "fused" and self.team.tp.is_rehearsing:
                raise RuntimeError("no such kernel")
            return compute(batch, pool)

        return computed

    def capture(
        self, compute: Callable[[], Tensor], beside: Graph | None, *, first: First | None
    ) -> tuple[Again, Tensor]:
        """As CUDA does it: a replay computes what was captured, and Python counts no bytes in it."""
        graph, out = capture(compute, beside, first=first)
        if self.fails == "capture" or (self.fails == "prompts" and not self.has_head):
            raise RuntimeError("operation not permitted when stream is capturing")
        replay, traffic, is_wrong = graph.replay, self.team.tp.traffic, self.fails == "equal" and self.way == "fused"

        def uncounted() -> None:
            before = traffic.received_bytes
            replay()
            traffic.received_bytes = before
            if is_wrong:
                out.mul_(1.5)

        graph.replay = uncounted
        return graph, out

    def rollout(self, requests: Sequence[Request]) -> None:
        """Generate, and note it."""
        made = len(Again.made)
        seen = all_at_once(self.engine, requests)
        self.seen.said |= seen.said
        self.seen.left = seen.left
        self.seen.captures.append(len(Again.made) - made)

    def ended(self) -> Replayed:
        """What was seen."""
        steps = self.engine.state.forward.module.captured
        self.seen.refusals = steps.refusals
        self.seen.received_bytes = {size: step.received_bytes for size, step in steps.steps.items()}
        self.seen.replays = sum(graph.replays for graph in Again.made)
        Again.made = []
        return self.seen


def replayed(
    worker: Any, sizes: dict[str, int], settings: dict[str, Any], requests: Sequence[Request], how: Mapping[str, Any]
) -> Replayed:
    """Three rollouts of the same requests: prompts of the first steps are captured in the second, when steps without
    any were shown to be right.

    Args:
        how: "fused": see `Steps.on`. "fails": what rank 1 is unable to do. "moves": whether something moves on rank 1
            before the last. "drops": whether rank 1 gives its graphs back before it.
    """
    at_once = mock.patch.object(prompt_captures, "BEFORE", 0)
    with at_once, mock.patch.object(captured_step, "CLOSE", AS_CLOSE):
        steps = Steps.on(worker, sizes, settings, how.get("fused", ""))
        if worker.rank == 1:
            steps.fails = how.get("fails", "")
        for turn in range(3):
            if turn == 2 and worker.rank == 1:
                steps.moves += bool(how.get("moves"))
                if how.get("drops"):
                    steps.engine.state.forward.drop_steps()
            steps.rollout(requests)
        return steps.ended()
