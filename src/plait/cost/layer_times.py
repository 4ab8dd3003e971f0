"""Seconds of one layer, and of the head, on the devices of one stage, term by term. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from plait.cost.layer_kinds import layer_kinds
from plait.cost.model_work import ModelWork, balance_bytes, balancing, weight_passes
from plait.cost.profile import Profile, interpolated
from plait.cost.shape_parameters import trained_readers
from plait.cost.traffic import Traffic
from plait.generation.settings import MOST_REPLAYED
from plait.layout.mesh import Layout
from plait.models.shape import ModelShape

if TYPE_CHECKING:
    from plait.cost.cluster import ClusterSpec

Terms = dict[str, float]

BALANCING = "router balance"
"""The term of the loss of routers."""
LOGIT_PASSES = 2
"""That a GPU makes over the logits to draw tokens (docs/gpu.md)."""


@dataclass(frozen=True)
class Micro:
    """The average micro-batch: tokens in its row, pairs of a query and a key, rows that pass the head.

    near: (window, pairs that are within it), of windows that are shorter than some sample
    head_forwards: how often a forward passes the head
    balanced: samples over which routers sum up what they choose, for a loss of theirs; 0: they have none
    sequence_parallel: ranks of tp have some of the tokens each between products (`sequence_parallel`)
    gathered_again: so a backward gathers what trained products read: nothing is computed again in it
    """

    tokens: float
    pairs: float
    head_rows: float
    near: tuple[tuple[int, float], ...] = ()
    head_forwards: int = 1
    balanced: float = 0.0
    sequence_parallel: bool = False
    gathered_again: bool = False

    def __truediv__(self, parts: float) -> Micro:
        near = tuple((window, pairs / parts) for window, pairs in self.near)
        tokens, pairs, head_rows, balanced = (
            count / parts for count in (self.tokens, self.pairs, self.head_rows, self.balanced)
        )
        return replace(self, tokens=tokens, pairs=pairs, head_rows=head_rows, near=near, balanced=balanced)

    def seen(self, window: int) -> float:
        """Pairs that a layer of a window computes; 0: it has none."""
        return dict(self.near).get(window, self.pairs)


def total(terms: Mapping[str, float]) -> float:
    return sum(terms.values())


def scaled(terms: Mapping[str, float], factor: float) -> Terms:
    return {name: factor * seconds for name, seconds in terms.items()}


def added(*parts: Mapping[str, float]) -> Terms:
    """The sum of each term, over the parts that have it."""
    result = dict(parts[0]) if parts else {}
    for part in parts[1:]:
        for name, seconds in part.items():
            result[name] = result.get(name, 0.0) + seconds
    return result


class LayerTimes:
    """Seconds of a layer of a model (the average layer, if they differ), and of what is before and after the layers.

    Args:
        cluster: its part with the ranks of the layout (`ClusterSpec.among`).
        devices: the layout of all instances that compute at the same time, if there is more than one.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        work: ModelWork,
        layout: Layout,
        profile: Profile | None = None,
        devices: Layout | None = None,
    ) -> None:
        self.cluster, self.work, self.layout, self.profile = cluster, work, layout, profile
        self.devices = devices or layout
        self.window = work.shape.window
        self.share = work.share(layout.parallelism.tp)
        self.traffic = Traffic(cluster, layout)
        software = cluster.software
        self.flops_per_s = cluster.device.flops_of(work.dtype) * software.products
        self.bytes_per_s = cluster.device.memory_bandwidth * software.memory

    def by_kind(self) -> tuple[LayerTimes, ...]:
        """Those of each kind of layers, as of a model whose layers are all of that kind; itself where all are alike."""
        kinds = layer_kinds(self.work.shape)
        if len(kinds) == 1:
            return (self,)
        works = (replace(self.work, shape=kind.shape) for kind in kinds)
        return tuple(LayerTimes(self.cluster, work, self.layout, self.profile, self.devices) for work in works)

    def passed(self, micro: Micro, *, backward: bool = False) -> Terms:
        """Seconds of one layer with its adapters."""
        pairs, read_bytes = micro.seen(self.window), self.work.read(micro.tokens, self.layout.parallelism.tp)
        return added(
            self.layer(micro.tokens, pairs, self.passes(backward) * read_bytes, backward=backward),
            self._adapters(micro.tokens, backward=backward),
            self._balancing(micro, backward=backward),
            self._together(micro, backward=backward),
        )

    def passes(self, backward: bool) -> int:
        """Forwards that a pass takes as long as, in what goes with weights."""
        return weight_passes(self.work, backward=backward)

    def _adapters(self, tokens: float, *, backward: bool = False) -> Terms:
        """A layer's as the plain layers compute them; none where there are none."""
        work = self.work
        if not work.lora.rank:
            return {}
        rate, bandwidth = self._products_rate(tokens), self.bytes_per_s
        seconds = work.adapter_s(tokens, self.layout.parallelism.tp, rate, bandwidth, backward=backward)
        return {"adapters": float(seconds) * self.contention}

    def _together(self, micro: Micro, *, backward: bool) -> Terms:
        """What it takes beyond the sums that tokens which are sharded come together: before a mixture, forward as
        backward (the sum behind its experts gives each rank all of them, where elsewhere the sum and the gathering
        before it are halves of one exchange), and in a backward what entered attention and MLP."""
        gatherings = self.gatherings(micro, backward=backward)
        if not gatherings or self.layout.parallelism.tp == 1:
            return {}
        row = micro.tokens * self.work.shape.hidden * self.work.width
        seconds = self.traffic.gather("tp", row) if self.profile is None else self._ring_s(row, 1)
        return {"tensor parallel": gatherings * seconds}

    def gatherings(self, micro: Micro, *, backward: bool = False) -> float:
        """How often all tokens come together in a layer beyond the sums (`_together`)."""
        if not micro.sequence_parallel:
            return 0.0
        shape, is_again = self.work.shape, backward and micro.gathered_again
        again = self._trained_readers if is_again else 0
        return (shape.expert_layers + again) / shape.layers

    @cached_property
    def _trained_readers(self) -> int:
        return trained_readers(self.work.shape, self.work.lora)

    def _balancing(self, micro: Micro, *, backward: bool) -> Terms:
        """What a router's loss takes; none where it has none."""
        if not micro.balanced:
            return {}
        flops = balancing(self.work.shape, micro.tokens, micro.balanced, backward=backward)
        return {BALANCING: flops / self._products_rate(micro.tokens) * self.contention}

    def _products_rate(self, tokens: float) -> float:
        """Floating point operations per second of products that are no layer's."""
        return self.flops_per_s if self.profile is None else interpolated(self.profile.products, tokens)

    def layer(self, tokens: float, pairs: float, read_bytes: float, *, backward: bool = False) -> Terms:
        """Seconds of one layer: what computes, what reading takes beyond that, what launching kernels takes beyond
        both.
        """
        tp, share = self.layout.parallelism.tp, self.share
        if self.profile is not None:
            which: Literal["forward", "backward"] = "backward" if backward else "forward"
            is_frozen = backward and self.work.lora.rank > 0
            terms = self._measured(self.profile.layer_s(tokens, "frozen" if is_frozen else which), tokens, 1 + backward)
            if tp > 1:
                terms["tensor parallel"] += self._waits_s(tokens, which)
            return terms
        products = self.work.products(tokens, backward=backward) * share / self.flops_per_s
        attention = self.work.attention(pairs, backward=backward) * share / self.flops_per_s
        reading = max(0.0, read_bytes / self.bytes_per_s - products - attention)
        launching = max(0.0, self.passes(backward) * self.cluster.software.layer_s - products - attention - reading)
        terms = {"products": products, "attention": attention, "reading": reading, "launching": launching}
        if tp > 1:
            terms["tensor parallel"] = 2 * self.traffic.all_reduce(
                "tp", tokens * self.work.shape.hidden * self.work.width
            )
        return terms

    def decode_layer(self, rows: float, context: float) -> Terms:
        """Seconds of one layer: one token more of `rows` samples, whose contexts have `context` tokens together."""
        sizes, work = self.layout.parallelism, self.work
        if self.profile is not None:
            is_replayed = self.profile.device == "cuda" and rows <= MOST_REPLAYED
            fixed_s = self.profile.replayed_fixed_s if is_replayed else None
            return self.generated(self.profile.decode_s(rows, context, is_part=sizes.tp > 1), rows, fixed_s)
        seen = min(context, rows * self.window) if self.window else context
        read_bytes = work.read(rows, sizes.tp) + work.kept(seen, sizes.tp) + work.states(rows, sizes.tp)
        return added(self.layer(rows, seen, read_bytes), self._adapters(rows))

    def generated(self, seconds: float, tokens: float, fixed_s: float | None = None) -> Terms:
        """`_measured` of a layer that generates: on a CPU its adapters are compiled with it, where it is no mixture,
        and take as long as so many weights more would.

        Args:
            fixed_s: see `Profile.fixed_s`, which it is where none is given.
        """
        assert self.profile is not None, "nothing was measured"
        terms, work = self._measured(seconds, tokens, fixed_s=fixed_s), self.work
        if not work.lora.rank:
            return terms
        if self.profile.device != "cpu" or self.layout.parallelism.tp > 1 or work.shape.expert_layers:
            return added(terms, self._adapters(tokens))
        return {**terms, "adapters": terms["layers"] * work.packed_adapter / (work.products(1) / 2)}

    def _measured(self, seconds: float, tokens: float, passes: int = 1, fixed_s: float | None = None) -> Terms:
        """A measured layer's time, by the weights that a token passes in this model's. Over tp the part that goes with
        weights is divided, and the rest, of which a backward has as much as two forwards, is not."""
        assert self.profile is not None, "nothing was measured"
        tp, other = self.layout.parallelism.tp, ModelWork(self._profile_shape, self.work.dtype, 1)
        fixed_s = self.profile.fixed_s if fixed_s is None else fixed_s
        fixed = min(seconds, passes * fixed_s) if tp > 1 else 0.0
        seconds = fixed + (seconds - fixed) * self.share
        terms = {"layers": seconds * self.work.products(1) / other.products(1) * self.contention}
        if tp > 1:
            row = tokens * self.work.shape.hidden * self.work.width
            terms["tensor parallel"] = 2 * self._ring_s(row, 2)
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
    def _measured_pair(self) -> LayerTimes:
        """The measured model over two processes."""
        assert self.profile is not None, "nothing was measured"
        work = ModelWork(self._profile_shape, self.work.dtype, 1)
        return LayerTimes(self.profile.cluster(2), work, Layout.on(range(2), tp=2), self.profile)

    def _ring_s(self, num_bytes: float, halves: Literal[1, 2]) -> float:
        """A sum of activations over tp, or one half of it, a gathering, as processes that compute between sums were
        measured to take."""
        assert self.profile is not None, "nothing was measured"
        measured, tp = self.profile.between, self.layout.parallelism.tp
        if measured is None or self.cluster.nodes > 1:
            return self.traffic.all_reduce("tp", num_bytes) if halves == 2 else self.traffic.gather("tp", num_bytes)
        return measured.latency_s + halves * (tp - 1) / tp * num_bytes / measured.bytes_per_s

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
        """What a step of generation takes beside its layers: the head, and where it was measured the drawing.

        On a GPU most of it is the host's, in which the device waits: only what reading the head and the logits takes
        goes with their size.
        """
        if self.profile is None:
            return self.head(rows)
        measured, tp = self.profile.shape, self.layout.parallelism.tp
        share, seconds = self.work.head / (measured.vocabulary * measured.hidden), self.profile.drawing_s(rows)
        fixed = 0.0
        if self.profile.device == "cuda":
            num_bytes = measured.vocabulary * self.work.width * (measured.hidden + rows * LOGIT_PASSES)
            fixed = max(0.0, seconds - num_bytes / self.profile.copy_bytes_per_s)
        return (fixed + (seconds - fixed) * share / tp) * self.contention

    def hop(self, micro: Micro) -> float:
        """Activations from one stage to the next, and what routers have summed up."""
        sums_bytes = balance_bytes(self.work, micro.balanced)
        return self.traffic.hop(micro.tokens * self.work.shape.hidden * self.work.width + sums_bytes)
