"""Seconds of forwards and backwards over a layout: micro-batches through pipeline stages, term by term. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from plait.cost.layer_kinds import stage_counts
from plait.cost.layer_times import BALANCING, LayerTimes, Micro, Terms, added, scaled, total
from plait.cost.pipelines import there, there_and_back

Seconds = TypeVar("Seconds")


def _of_layers(layers: Iterable[tuple[int, Terms]]) -> Terms:
    """Seconds of so many layers of each kind."""
    return added(*(scaled(layer, count) for count, layer in layers if count))


class Passes:
    """What passes of one model over one layout take.

    Args:
        times: of the average layer.
        stages: `times` by the devices of each stage, where stages are on devices of several kinds.
    """

    def __init__(self, times: LayerTimes, stages: Sequence[LayerTimes] = ()) -> None:
        self.times, self.stages = times, tuple(stages)
        self._kinds = tuple(stage.by_kind() for stage in stages or (times,))
        self._counts = stage_counts(times.work.shape, times.layout.parallelism)
        last, first_of = len(self._counts) - 1, dict[tuple[tuple[int, ...], bool], int]()
        self._alike = tuple(
            stage if self.stages else first_of.setdefault((counts, stage == last), stage)
            for stage, counts in enumerate(self._counts)
        )
        """By stage, the first that has as many layers on such devices, and the head if it has that."""

    def of_stage(self, stage: int) -> LayerTimes:
        """`times` by the devices of a stage; -1: of the last."""
        return self.stages[stage] if self.stages else self.times

    def kinds(self, stage: int) -> tuple[LayerTimes, ...]:
        """`LayerTimes.by_kind` by the devices of a stage."""
        return self._kinds[stage if self.stages else 0]

    def layers(self, seconds: Callable[[LayerTimes], Seconds]) -> list[list[tuple[int, Seconds]]]:
        """How many layers of each kind each stage has, and what one takes there."""
        of_stages = [[seconds(kind) for kind in kinds] for kinds in self._kinds]
        if not self.stages:
            of_stages *= len(self._counts)
        return [list(zip(*stage, strict=True)) for stage in zip(self._counts, of_stages, strict=True)]

    def forward(self, micro: Micro, stage: int) -> Terms:
        """Seconds of a stage."""
        return self._stage(micro, stage)

    def backward(self, micro: Micro, stage: int) -> Terms:
        """Seconds of a stage: twice a forward's, with sums over tp as a forward has. With adapters what goes with the
        weights under them takes as long as in a forward, as these get no gradients; attention and adapters twice."""
        return self._stage(micro, stage, backward=True)

    def _stage(self, micro: Micro, stage: int, *, backward: bool = False) -> Terms:
        layers = [kind.passed(micro, backward=backward) for kind in self.kinds(stage)]
        terms = _of_layers(zip(self._counts[stage], layers, strict=True))
        if stage == self.times.layout.parallelism.pp - 1:
            times = self.of_stage(stage)
            seconds = times.head(micro.head_rows, passes=times.passes(backward))
            terms["head"] = seconds if backward else micro.head_forwards * seconds
        return terms

    def _by_stage(self, of_stage: Callable[[int], Terms]) -> list[Terms]:
        """What is said of each stage; of stages that are alike it is asked once."""
        known = {stage: of_stage(stage) for stage in dict.fromkeys(self._alike)}
        return [known[stage] for stage in self._alike]

    def decode_stages(self, rows: float, context: float) -> list[Terms]:
        """`LayerTimes.decode_layer`, of all layers of each stage."""
        layers = [[kind.decode_layer(rows, context) for kind in kinds] for kinds in self._kinds]
        return self._by_stage(
            lambda stage: _of_layers(zip(self._counts[stage], layers[stage if self.stages else 0], strict=True))
        )

    def scoring(self, micro: Micro, count: int, *, in_turn: bool = False) -> Terms:
        """`count` micro-batches, forwards alone.

        Args:
            in_turn: each passes all stages before the next begins.
        """
        stages = self._by_stage(lambda stage: self.forward(micro, stage))
        return there(stages, count, self.times.hop(micro), in_turn=in_turn)

    def prompts(self, micro: Micro, count: int, *, in_turn: bool) -> Terms:
        """`scoring` of prompts before their samples are generated: layers that no ranks share are compiled for that."""
        profile, sizes = self.times.profile, self.times.layout.parallelism
        if profile is None or sizes.tp > 1:
            return self.scoring(micro, count, in_turn=in_turn)

        def of_stage(stage: int) -> Terms:
            times = self.of_stage(stage)
            layer = times.generated(profile.layer_s(micro.tokens, "prompts"), micro.tokens)
            terms = scaled(layer, sum(self._counts[stage]))
            return added(terms, {"head": times.head(micro.head_rows)}) if stage == sizes.pp - 1 else terms

        return there(self._by_stage(of_stage), count, self.times.hop(micro), in_turn=in_turn)

    def training(self, micro: Micro, count: int, *, recompute: bool, schedule: str) -> Terms:
        """`count` micro-batches, forwards and backwards.

        Args:
            schedule: of the pipeline, as a placement names it; empty: 1F1B.
        """

        def of_stage(stage: int) -> Terms:
            forward = self.forward(micro, stage)
            once = forward.get("head", 0.0) + forward.get(BALANCING, 0.0)
            again = {"recomputing": total(forward) - once} if recompute else {}
            return added(forward, self.backward(micro, stage), again)

        return there_and_back(self._by_stage(of_stage), count, self.times.hop(micro), schedule)

    def received_bytes(self, micro: Micro, *, backward: bool = False) -> int:
        """What the devices of one copy receive in a forward or backward of a micro-batch: sums over tp, tokens that
        come together, and hops."""
        work, sizes = self.times.work, self.times.layout.parallelism
        row = micro.tokens * work.shape.hidden * work.width
        halves = (2 * 2 + self.times.gatherings(micro, backward=backward)) * work.shape.layers
        sums = halves * (sizes.tp - 1) * row
        return int(sums + (sizes.pp - 1) * sizes.tp * row)
