"""A cost model in a few lines: seconds by the work of a call, bytes by the size of a role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from plait.cost.costs import CallCost, MoveCost, Spread, Tail, num_instances
from plait.cost.generation_memory import EngineBytes
from plait.cost.working_memory import PROCESS
from plait.layout.mesh import Cluster, Layout
from plait.schedule.plan import Mode


@dataclass(frozen=True)
class Devices:
    mesh_cluster: Cluster
    memory: int

    def memory_of(self, rank: int) -> int:
        return self.memory

    def kinds_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class StandIn:
    """
    work:    seconds of a call on one device
    weights: bytes of a role
    memory:  bytes of a device
    tax:     of tensor parallelism, in parts of the work for each further device; of decoding ten times as much
    tails:   of generations by several instances, `end_s` beside the seconds of the call
    crowded_s: more of a generation for each byte that its device holds beside
    """

    work: Mapping[str, float]
    weights: Mapping[str, int]
    nodes: int = 1
    devices: int = 8
    memory: int = 100
    tax: float = 0.02
    move_s: float = 0.1
    activations: int = 4
    tails: tuple[Tail, ...] = ()
    first_s: float = 0.0
    crowded_s: float = 0.0
    process_bytes: int = 0
    engine_bytes: Mapping[str, EngineBytes] = field(default_factory=dict)
    slack_bytes: int = 0
    keeps_freed: bool = False
    connections: None = None

    @property
    def process_terms(self) -> Mapping[str, int]:
        return {PROCESS: self.process_bytes}

    @property
    def cluster(self) -> Devices:
        return Devices(Cluster(self.nodes, self.devices), self.memory)

    def slack(self, **_: object) -> Mapping[str, int]:
        return {"slack": self.slack_bytes}

    def call(
        self,
        call: str,
        mode: Mode,
        layout: Layout,
        *,
        micro_batch_tokens: int | None = None,
        schedule: str = "",
        spread: Spread | None = None,
    ) -> CallCost:
        sizes = layout.parallelism
        size = sizes.size if spread is None else sum(other.parallelism.size for other in spread.samples)
        compute = self.work[call] / size
        tensor = compute * (sizes.tp - 1) * self.tax * (10 if mode == "decode" else 1)
        spans = {rank // self.devices for rank in layout.instances()[0].mesh.ranks}
        far = compute * 0.5 * (sizes.tp > 1) * (len(spans) > sizes.pp)
        bubble = compute * (sizes.pp - 1) / 4 * (4 if mode == "decode" else 1)
        fixed = 0.01 * self.work[call] * (1 if mode == "decode" else 0)
        share = 1.0 if micro_batch_tokens is None else micro_batch_tokens / 4096
        in_flight = [sizes.pp - stage for stage in range(sizes.pp)] if schedule != "one at a time" else [1] * sizes.pp
        slower = compute * 0.3 * (schedule == "one at a time") + compute * 0.1 * (share < 1)
        terms = {
            "compute": compute,
            "tensor": tensor + far,
            "bubble": bubble,
            "fixed": fixed,
            "slower": slower,
        }
        working = tuple(int(self.activations * share * one / sizes.tp / sizes.pp) + 1 for one in in_flight)
        drawing = (layout,) if spread is None else spread.samples
        several = mode == "decode" and num_instances(drawing) > 1
        first_s = self.first_s if mode == "decode" else 0.0
        tails = self.tails if several else ()
        seconds = sum(terms.values())
        by_instance = (seconds,) * sizes.dp if spread else ()
        return CallCost(seconds, terms, 0, working, by_instance, tails, first_s, activation_bytes=working)

    def working_bytes(
        self, call: str, mode: Mode, layout: Layout, *, micro_batch_tokens: int | None = None, schedule: str = ""
    ) -> tuple[int, ...]:
        asked = self.call(call, mode, layout, micro_batch_tokens=micro_batch_tokens, schedule=schedule)
        return asked.working_bytes

    def stage_seconds(self, call: str, layout: Layout, micro_batches: int) -> list[tuple[float, float]]:
        """A backward takes twice as long as a forward."""
        forward_s = self.work[call] / layout.parallelism.size / micro_batches / 3
        return [(forward_s, 2 * forward_s)] * layout.parallelism.pp

    @property
    def pool_takes_rest(self) -> bool:
        return self.crowded_s > 0

    def generation(self, call: str, layout: Layout, spread: Spread, held_bytes: tuple[int, ...]) -> CallCost:
        found, num_bytes = self.call(call, "decode", layout), held_bytes[spread.samples.index(layout)]
        return replace(found, seconds=found.seconds + self.crowded_s * num_bytes, working_bytes=(num_bytes // 10,))

    def move(self, role: str, source: Layout, target: Layout) -> MoveCost:
        return MoveCost(self.move_s * self.weights[role] / 10 if source != target else 0.0, {}, self.weights[role])

    def offload(self, role: str, layout: Layout, what: Literal["weights", "state"]) -> MoveCost:
        one = self.weights[role] / layout.parallelism.tp / layout.parallelism.pp
        return MoveCost(0.02 * one * (1 if what == "weights" else 4))

    def held_bytes(self, role: str, layout: Layout, *, trained: bool) -> tuple[int, ...]:
        sizes = layout.parallelism
        weights = self.weights[role] / sizes.tp / sizes.pp
        stages = sizes.stages or (1,) * sizes.pp
        layers = sum(stages)
        shares = [weights * sizes.pp * one / layers for one in stages]
        return tuple(int(one * (1 + (2 + 6 / sizes.dp) * trained)) for one in shares)
