"""Seconds of forwards and backwards over a layout: micro-batches through pipeline stages, term by term. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from plait.cost.layer_kinds import layer_kinds, stage_counts
from plait.cost.model_work import ModelWork
from plait.cost.profile import Profile, interpolated
from plait.cost.traffic import Traffic
from plait.layout.mesh import Layout
from plait.models.shape import ModelShape

if TYPE_CHECKING:
    from plait.cost.cluster import ClusterSpec

Terms = dict[str, float]


@dataclass(frozen=True)
class Micro:
    """The average micro-batch: tokens in its row, pairs of a query and a key, rows that pass the head.

    near: (window, pairs that are within it), of windows that are shorter than some sample
    """

    tokens: float
    pairs: float
    head_rows: float
    near: tuple[tuple[int, float], ...] = ()

    def __truediv__(self, parts: float) -> Micro:
        near = tuple((window, pairs / parts) for window, pairs in self.near)
        return Micro(self.tokens / parts, self.pairs / parts, self.head_rows / parts, near)

    def seen(self, window: int) -> float:
        """Pairs that a layer of a window computes; 0: it has none."""
        return dict(self.near).get(window, self.pairs)


def total(terms: Mapping[str, float]) -> float:
    return sum(terms.values())


def scaled(terms: Mapping[str, float], factor: float) -> Terms:
    return {name: factor * seconds for name, seconds in terms.items()}


def added(*parts: Mapping[str, float]) -> Terms:
    result: Terms = {}
    for part in parts:
        for name, seconds in part.items():
            result[name] = result.get(name, 0.0) + seconds
    return result


def _of_layers(layers: Sequence[Terms], counts: Sequence[int]) -> Terms:
    """Of so many layers of each kind."""
    return added(*(scaled(layer, count) for layer, count in zip(layers, counts, strict=True) if count))


class Passes:
    """What passes of one model over one layout take.

    Args:
        cluster: as the ranks of the layout have it (`ClusterSpec.among`).
        devices: of all that compute at the same time, where they are more than one instance's.
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
        self.cluster, self.work, self.layout, self.profile = cluster, work, layout, profile
        self.stages = tuple(Passes(stage, work, layout, profile, devices) for stage in stages)
        unlike = kinds if len(kinds := layer_kinds(work.shape)) > 1 else ()
        self._unlike = tuple(
            Passes(cluster, replace(work, shape=kind.shape), layout, profile, devices) for kind in unlike
        )
        self.stage_counts = stage_counts(work.shape, layout.parallelism)
        """Of each stage, how many layers of each of `kinds` it has."""
        self.devices = devices or layout
        self.share = work.share(layout.parallelism.tp)
        self.traffic = Traffic(cluster, layout)
        software = cluster.software
        self.flops_per_s = cluster.device.flops_of(work.dtype) * software.products
        self.bytes_per_s = cluster.device.memory_bandwidth * software.memory

    @property
    def kinds(self) -> tuple[Passes, ...]:
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
            terms["head"] = self.head(micro.head_rows, passes=self._passes(backward))
        return terms

    def passed(self, micro: Micro, *, backward: bool = False) -> Terms:
        """Seconds of one layer with its adapters."""
        work, passes = self.work, self._passes(backward)
        read_bytes = passes * work.read(micro.tokens) / self.layout.parallelism.tp
        of_weights = self.layer(micro.tokens, micro.seen(work.window), read_bytes, passes=passes)
        return added(of_weights, self._adapters(micro.tokens, backward=backward))

    def _passes(self, backward: bool) -> int:
        """Forwards that a pass takes as long as, beside adapters."""
        return 2 if backward and not self.work.lora.rank else 1

    def _adapters(self, tokens: float, *, backward: bool = False) -> Terms:
        """A layer's as the plain layers compute them; none where there are none."""
        work = self.work
        if not work.adapter:
            return {}
        rate, bandwidth = self.flops_per_s, self.bytes_per_s
        if self.profile is not None:
            rate = interpolated(self.profile.products, tokens)
        seconds = work.adapter_s(tokens, rate, bandwidth, backward=backward)
        return {"adapters": float(seconds) * self.contention}

    def layer(self, tokens: float, pairs: float, read_bytes: float, *, passes: int = 1) -> Terms:
        """Seconds of one layer: what computes, what reading takes beyond that, what launching kernels takes beyond
        both.
        """
        tp, share = self.layout.parallelism.tp, self.share
        if self.profile is not None:
            which: Literal["forward", "backward"] = "backward" if passes > 1 else "forward"
            terms = self._measured(self.profile.layer_s(tokens, which), tokens, passes)
            if tp > 1:
                terms["tensor parallel"] += self._waits_s(tokens, which)
            return terms
        products = passes * self.work.products(tokens) * share / self.flops_per_s
        attention = passes * self.work.attention(pairs) * share / self.flops_per_s
        reading = max(0.0, read_bytes / self.bytes_per_s - products - attention)
        launching = max(0.0, passes * self.cluster.software.layer_s - products - attention - reading)
        terms = {"products": products, "attention": attention, "reading": reading, "launching": launching}
        if tp > 1:
            terms["tensor parallel"] = 2 * self.traffic.all_reduce(
                "tp", tokens * self.work.shape.hidden * self.work.width
            )
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

    def decode_layer(self, rows: float, context: float) -> Terms:
        """Seconds of one layer: one token more of `rows` samples, whose contexts have `context` tokens together."""
        sizes, work = self.layout.parallelism, self.work
        if self.profile is not None:
            is_part = sizes.tp * sizes.pp > 1
            return self._generated(self.profile.decode_s(rows, context, is_part=is_part), rows)
        seen = min(context, rows * work.window) if work.window else context
        read_bytes = work.read(rows) / sizes.tp + work.kept(seen, sizes.tp)
        return added(self.layer(rows, seen, read_bytes), self._adapters(rows))

    def _generated(self, seconds: float, tokens: float) -> Terms:
        """`_measured` of a layer that generates: on a CPU a whole model's adapters are compiled with it, and take as
        long as so many weights more would."""
        assert self.profile is not None, "nothing was measured"
        terms, work = self._measured(seconds, tokens), self.work
        if not work.adapter:
            return terms
        if self.profile.device != "cpu":
            return added(terms, self._adapters(tokens))
        return {**terms, "adapters": terms["layers"] * work.packed_adapter / (work.products(1) / 2)}

    def _measured(self, seconds: float, tokens: float, passes: int = 1) -> Terms:
        """A measured layer's time, by the weights that a token passes in this model's. Over tp the part that goes with
        weights is divided, and the rest, of which a backward has as much as two forwards, is not."""
        assert self.profile is not None, "nothing was measured"
        tp, other = self.layout.parallelism.tp, ModelWork(self._profile_shape, self.work.dtype, 1)
        fixed = min(seconds, passes * self.profile.fixed_s) if tp > 1 else 0.0
        seconds = fixed + (seconds - fixed) * self.share
        terms = {"layers": seconds * self.work.products(1) / other.products(1) * self.contention}
        if tp > 1:
            row = tokens * self.work.shape.hidden * self.work.width
            terms["tensor parallel"] = 2 * self._sum_s(row)
        return terms

    def _waits_s(self, tokens: float, which: Literal["forward", "backward"]) -> float:
        """What a layer that two processes share was measured to take beyond its halves and its sums: smaller products,
        heads that are no even number, and that each waits for the other where it is in its layer."""
        assert self.profile is not None, "nothing was measured"
        measured = self.profile.cut_forward if which == "forward" else self.profile.cut_backward
        if not measured:
            return 0.0
        two = self._measured_pair
        halves = total(two._measured(self.profile.layer_s(tokens, which), tokens, 1 + (which == "backward")))
        share = self.work.products(1) / two.work.products(1)
        return max(0.0, interpolated(measured, tokens) - halves) * share

    @cached_property
    def _measured_pair(self) -> Passes:
        """The measured model over two processes."""
        assert self.profile is not None, "nothing was measured"
        work = ModelWork(self._profile_shape, self.work.dtype, 1)
        return Passes(self.profile.cluster(2), work, Layout.on(range(2), tp=2), self.profile)

    def _sum_s(self, num_bytes: float) -> float:
        """A sum of activations over tp, as processes that compute between sums were measured to take."""
        assert self.profile is not None, "nothing was measured"
        measured, tp = self.profile.between, self.layout.parallelism.tp
        if measured is None or self.cluster.nodes > 1:
            return self.traffic.all_reduce("tp", num_bytes)
        return measured.latency_s + 2 * (tp - 1) / tp * num_bytes / measured.bytes_per_s

    @property
    def contention(self) -> float:
        """Times as long as alone that processes of a machine compute, by how many of them a call has."""
        most = self.cluster.num_devices - 1
        if self.profile is None or most < 1:
            return 1.0
        return 1.0 + (self.profile.contention - 1.0) * (len(self.devices.mesh.ranks) - 1) / most

    @property
    def _profile_shape(self) -> ModelShape:
        assert self.profile is not None, "nothing was measured"
        return self.profile.shape

    def head(self, rows: float, *, passes: int = 1) -> float:
        """The product with the head, of which each device of a tensor-parallel group has a part; `passes` 2: its
        backward."""
        tp, work = self.layout.parallelism.tp, self.work
        if self.profile is not None:
            measured = self.profile.shape
            share = work.head / (measured.vocabulary * measured.hidden)
            seconds = self.profile.head_s(rows, backward=passes > 1)
            return seconds * share / tp * self.contention if rows else 0.0
        computing = 2 * rows * work.head / tp / self.flops_per_s
        return passes * max(computing, work.head * work.width / tp / self.bytes_per_s) if rows else 0.0

    def drawing(self, rows: float) -> float:
        """What a step of generation takes beside its layers: the head, and where it was measured the drawing."""
        if self.profile is None:
            return self.head(rows)
        measured = self.profile.shape
        share = self.work.head / (measured.vocabulary * measured.hidden)
        return self.profile.drawing_s(rows) * share / self.layout.parallelism.tp * self.contention

    def hop(self, micro: Micro) -> float:
        """Activations from one stage to the next."""
        return self.traffic.hop(micro.tokens * self.work.shape.hidden * self.work.width)

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
        layers = scaled(self._generated(profile.layer_s(micro.tokens, "prompts"), micro.tokens), self.work.shape.layers)
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
