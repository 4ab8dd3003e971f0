"""Seconds of forwards and backwards over a layout: micro-batches through pipeline stages, term by term. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from plait.cost.layer_kinds import layer_kinds, stage_counts
from plait.cost.layer_times import LayerTimes, Micro, Terms, added, scaled, total
from plait.cost.model_work import ModelWork
from plait.cost.profile import Profile
from plait.layout.mesh import Layout

if TYPE_CHECKING:
    from plait.cost.cluster import ClusterSpec


def _of_layers(layers: Sequence[Terms], counts: Sequence[int]) -> Terms:
    """Seconds of so many layers of each kind."""
    return added(*(scaled(layer, count) for layer, count in zip(layers, counts, strict=True) if count))


class Passes(LayerTimes):
    """What passes of one model over one layout take; its `LayerTimes` are those of the average layer.

    Args:
        cluster, devices: see `LayerTimes`.
        stages: the cluster as the ranks of each stage have it, where stages are on devices of several kinds.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        work: ModelWork,
        layout: Layout,
        profile: Profile | None = None,
        devices: Layout | None = None,
        stages: Sequence[ClusterSpec] = (),
    ) -> None:
        super().__init__(cluster, work, layout, profile, devices)
        self.stages = tuple(Passes(stage, work, layout, profile, devices) for stage in stages)
        unlike = kinds if len(kinds := layer_kinds(work.shape)) > 1 else ()
        self._unlike = tuple(
            LayerTimes(cluster, replace(work, shape=kind.shape), layout, profile, devices) for kind in unlike
        )
        self.stage_counts = stage_counts(work.shape, layout.parallelism)
        """How many layers of each of `kinds` a stage has, by stage."""

    @property
    def kinds(self) -> tuple[LayerTimes, ...]:
        """By the kind of the layers, what passes took if all layers were of that kind."""
        return self._unlike or (self,)

    def of_stage(self, stage: int) -> Passes:
        """By the devices of a stage, whatever layers are asked about; -1: of the last."""
        return self.stages[stage] if self.stages else self

    def forward(self, micro: Micro, stage: int) -> Terms:
        """Seconds of a stage."""
        return self.of_stage(stage)._stage(micro, stage)

    def backward(self, micro: Micro, stage: int) -> Terms:
        """Seconds of a stage: twice a forward's, with sums over tp as a forward has; with adapters those of the
        adapters twice, and of the rest once, as the weights under them get no gradients."""
        return self.of_stage(stage)._stage(micro, stage, backward=True)

    def _stage(self, micro: Micro, stage: int, *, backward: bool = False) -> Terms:
        terms = _of_layers([kind.passed(micro, backward=backward) for kind in self.kinds], self.stage_counts[stage])
        if stage == self.layout.parallelism.pp - 1:
            terms["head"] = self.head(micro.head_rows, passes=self.passes(backward))
        return terms

    def decode_stages(self, rows: float, context: float) -> list[Terms]:
        """`decode_layer`, of all layers of each stage."""
        of_stages = [stage.decode_kinds(rows, context) for stage in self.stages] or [
            self.decode_kinds(rows, context)
        ] * len(self.stage_counts)
        return [_of_layers(layers, counts) for layers, counts in zip(of_stages, self.stage_counts, strict=True)]

    def decode_kinds(self, rows: float, context: float) -> list[Terms]:
        """`decode_layer`, by the kind of the layer."""
        return [kind.decode_layer(rows, context) for kind in self.kinds]

    def scoring(self, micro: Micro, count: int, *, in_turn: bool = False) -> Terms:
        """`count` micro-batches, forwards alone.

        Args:
            in_turn: each passes all stages before the next begins.
        """
        stages = [self.forward(micro, stage) for stage in range(self.layout.parallelism.pp)]
        return self._piped(stages, count, self.hop(micro), in_turn=in_turn)

    def prompts(self, micro: Micro, count: int, *, in_turn: bool) -> Terms:
        """`scoring` of prompts before their samples are generated: a whole model's layers are compiled for that."""
        profile, sizes = self.profile, self.layout.parallelism
        if profile is None or sizes.tp * sizes.pp > 1:
            return self.scoring(micro, count, in_turn=in_turn)
        layers = scaled(self.generated(profile.layer_s(micro.tokens, "prompts"), micro.tokens), self.work.shape.layers)
        return scaled(added(layers, {"head": self.head(micro.head_rows)}), count)

    def training(self, micro: Micro, count: int, *, recompute: bool, schedule: str) -> Terms:
        """`count` micro-batches, forwards and backwards: 1F1B and GPipe take equally long, fill and drain once."""
        stages = []
        for stage in range(self.layout.parallelism.pp):
            forward = self.forward(micro, stage)
            again = {"recomputing": total(forward) - forward.get("head", 0.0)} if recompute else {}
            stages.append(added(forward, self.backward(micro, stage), again))
        return self._piped(stages, count, 2 * self.hop(micro), in_turn=schedule == "one at a time")

    def _piped(self, stages: Sequence[Terms], count: int, hop_s: float, *, in_turn: bool) -> Terms:
        """The slowest stage does all micro-batches; before and after it the pipeline fills and drains."""
        times = [total(stage) for stage in stages]
        slowest = max(range(len(stages)), key=times.__getitem__)
        waits = count if in_turn else 1
        terms = scaled(stages[slowest], count)
        if len(stages) > 1:
            terms["filling and draining"] = waits * (sum(times) - times[slowest])
            terms["hops"] = waits * (len(stages) - 1) * hop_s
        return terms
