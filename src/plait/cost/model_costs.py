"""The cost model: seconds and bytes of every call of a flow, from shapes, a workload and a cluster (`costs.Costs`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache
from math import ceil
from typing import Literal

from plait.cost.cluster import ClusterSpec
from plait.cost.costs import CallCost, MoveCost
from plait.cost.decoding import Decoding, Piece, dealt, profile
from plait.cost.generation_memory import held_tokens, packed_bytes
from plait.cost.held_memory import optimizer_bytes
from plait.cost.model_work import ModelWork
from plait.cost.moves import move_cost
from plait.cost.passes import Micro, Passes, Terms, added, scaled, total
from plait.cost.profile import Profile
from plait.cost.traffic import Traffic
from plait.cost.working_memory import LargestBatch, activation_bytes, head_gradient_bytes, logits_bytes
from plait.cost.workload import Samples, Workload
from plait.dataflow import Dataflow, Node
from plait.layout.decoder import decoder_parameters
from plait.layout.mesh import Layout, Parallelism
from plait.layout.params import Heads, Parameters
from plait.layout.shards import shard, stage_bounds
from plait.models.shape import ModelShape
from plait.recipes.role_models import SCALAR_ROLES
from plait.schedule.plan import Mode
from plait.training.memory import BYTES, parameter_bytes


def parameters_of_shape(shape: ModelShape, outputs: int | None = None) -> Parameters:
    """The parameters of a decoder of this shape, experts as dense layers' equals; `outputs` of a scalar model."""
    mixture = shape.expert_layers > 0
    return decoder_parameters(
        layers=shape.layers,
        hidden=shape.hidden,
        intermediate=shape.expert_intermediate if mixture else shape.intermediate,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocabulary=shape.vocabulary,
        tied=shape.tied,
        experts=shape.experts if mixture else 0,
        outputs=outputs,
    )


class ModelCosts:
    """`costs.Costs` by formulas.

    Args:
        shapes: role → the shape of its model; of a role that is none (reward functions), nothing.
        parameters: role → its parameters, where a model's own are known; else those of a decoder of its shape.
        reserved_bytes: of every device, that others hold while tokens are drawn; counts where the software's pool of
            keys and values takes a share of the device.
        profile: what a machine was measured to do, in place of the device's numbers; the cluster is then
            `profile.cluster(devices)`. Calls and moves take as many times as long as in the runs that it knows.
        corrected: False: as the profile alone says it.
    """

    def __init__(
        self,
        workload: Workload,
        shapes: Mapping[str, ModelShape],
        flow: Dataflow,
        cluster: ClusterSpec,
        *,
        parameters: Mapping[str, Parameters] | None = None,
        reserved_bytes: int = 0,
        profile: Profile | None = None,
        corrected: bool = True,
    ) -> None:
        self.cluster = cluster
        self.workload, self.shapes, self.flow = workload, dict(shapes), flow
        self._nodes = {node.call: node for node in flow.nodes}
        self._reserved_bytes, self._profile = reserved_bytes, profile
        ratios = profile.ratios(cluster.num_devices) if profile is not None and corrected else {}
        self._ratios = {kind: one.value for kind, one in ratios.items()}
        self._given = dict(parameters or {})
        # Kept by instance: a search asks for the same again and again.
        self.call = cache(self._call)
        self.move = cache(self._move)
        self.offload = cache(self._offload)
        self._parameters = cache(self._parameters_of)
        self._held = cache(self._held_of)
        self._passes = cache(self._passes_of)

    def _call(
        self, call: str, mode: Mode, layout: Layout, *, micro_batch_tokens: int | None = None, schedule: str = ""
    ) -> CallCost:
        node = self._nodes[call]
        if node.role not in self.shapes:
            return self._functions(node)
        budget = micro_batch_tokens or self.workload.micro_batch_tokens
        match mode:
            case "train":
                found = self._train(node, layout, budget, schedule)
            case "score":
                found = self._score(node, layout, budget)
            case _:
                found = self._generate(node, layout, prompts_alone=mode == "prefill")
        ratio = self._ratios.get("decode" if mode == "prefill" else mode)
        return found if ratio is None else found.times(ratio)

    def held_bytes(self, role: str, layout: Layout, *, trained: bool) -> tuple[int, ...]:
        return self._held(role, layout.parallelism, trained)

    # Calls

    def _functions(self, node: Node) -> CallCost:
        """What reward functions take, in processes of their own beside the devices."""
        samples = self.workload.samples_of(self.flow, node).count
        terms = {"functions": ceil(samples / self.workload.workers) * self.workload.function_s}
        return CallCost(total(terms), terms)

    def _score(self, node: Node, layout: Layout, budget: int) -> CallCost:
        passes = self._passes(str(node.role), layout)
        samples = self.workload.samples_of(self.flow, node)
        share = ceil(samples.count / layout.parallelism.dp)
        micro, count = self._micro(node, samples, share, layout, budget)
        terms = passes.scoring(micro, count)
        num_bytes = self._tp_bytes(passes, micro, layout) * count * layout.parallelism.dp
        return CallCost(total(terms), terms, num_bytes, self._forward_bytes(node, layout, budget, train=False))

    def _train(self, node: Node, layout: Layout, budget: int, schedule: str) -> CallCost:
        role, sizes, options = str(node.role), layout.parallelism, node.training
        passes, samples = self._passes(role, layout), self.workload.samples_of(self.flow, node)
        mini_batches = min(options.mini_batches, samples.count)
        share = ceil(samples.count / mini_batches / sizes.dp)
        micro, count = self._micro(node, samples, share, layout, budget)
        adapted = self.workload.lora_rank > 0
        step = passes.training(
            micro,
            count,
            recompute=self.workload.checkpoint_activations,
            schedule=schedule,
            backward=1 if adapted else 2,
        )
        update, update_bytes = self._update(role, layout)
        steps = mini_batches * options.epochs
        terms = scaled(added(step, update), steps)
        moved = self._tp_bytes(passes, micro, layout) * count * sizes.dp * (2 + self.workload.checkpoint_activations)
        working = self._forward_bytes(node, layout, budget, train=True)
        return CallCost(total(terms), terms, steps * (moved + update_bytes), working)

    def _update(self, role: str, layout: Layout) -> tuple[Terms, int]:
        """An optimizer step: gradients are summed over dp, each device updates its range, new weights are gathered."""
        sizes, per = layout.parallelism, parameter_bytes(self.workload.dtype, trained=True)
        elements = max(self._trained_elements(role, sizes))
        traffic = Traffic(self.cluster, layout)
        passed = 2 * (per.masters + per.moments) + (per.weights if per.masters else 0)
        read = elements / sizes.dp * (passed + per.gradients)
        terms = {"optimizer": read / (self.cluster.device.memory_bandwidth * self.cluster.software.memory)}
        if self._profile is not None and self._profile.optimizer_s is not None:
            terms = {"optimizer": elements / sizes.dp * self._profile.optimizer_s}
        if sizes.dp > 1:
            terms["gradients"] = traffic.gather("dp", elements * per.gradients)
            terms["new weights"] = traffic.gather("dp", elements * per.weights)
        received = (sizes.dp - 1) / sizes.dp * (per.gradients + per.weights) * sizes.dp * sizes.tp
        return terms, int(received * sum(self._trained_elements(role, sizes)))

    def _generate(self, node: Node, layout: Layout, *, prompts_alone: bool) -> CallCost:
        role, workload = str(node.role), self.workload
        samples = workload.samples_of(self.flow, node)
        count = min(layout.parallelism.dp, samples.prompts)
        shares = dealt(workload.lengths.responses.of(samples.count), samples.per_prompt, count)
        running = self._running(role, layout, max(map(len, shares)))
        passes = self._passes(role, layout.instances()[0])
        decoding = Decoding(passes, workload.lengths.prompts.mean)
        found: dict[tuple[int, tuple[Piece, ...]], Terms] = {}
        instances: list[Terms] = []
        for share in shares:
            pieces = () if prompts_alone else profile(share, running)
            key = (len(share), pieces)
            if key not in found:
                prompts = self._prompts(passes, samples, len(share) // samples.per_prompt)
                found[key] = added(self._packing(role, layout), prompts, decoding.seconds(pieces))
            instances.append(found[key])
        seconds = tuple(total(terms) for terms in instances)
        longest = max(range(len(seconds)), key=seconds.__getitem__)
        idle = (0.0,) * (layout.parallelism.dp - count)
        return CallCost(
            seconds[longest], instances[longest], 0, self._cache_bytes(role, layout, running), seconds + idle
        )

    def _packing(self, role: str, layout: Layout) -> Terms:
        """Weights that are laid out anew for decoding, where the measured engine does that, and one device has all."""
        rate = None if self._profile is None else self._profile.packing_bytes_per_s
        sizes = layout.parallelism
        if rate is None or sizes.tp * sizes.pp > 1:
            return {}
        return {"packing": self._held(role, Parallelism(), False)[0] / rate}

    def _prompts(self, passes: Passes, samples: Samples, prompts: int) -> Terms:
        """Prompts of one instance, each computed once for all of its samples."""
        lengths, most = self.workload.lengths.prompts, self.workload.max_prefill_tokens
        tokens = prompts * lengths.mean
        groups = self.cluster.software.decode_groups_per_stage * passes.layout.parallelism.pp
        chunks = max(ceil(tokens / most), min(groups, prompts))
        micro = Micro(tokens, prompts * (lengths.mean_square + lengths.mean) / 2, prompts) / chunks
        return {"prompts": total(passes.scoring(micro, chunks, in_turn=groups == 0))}

    def _micro(self, node: Node, samples: Samples, share: int, layout: Layout, budget: int) -> tuple[Micro, int]:
        """The average micro-batch of a copy's share of samples, and their number."""
        lengths, pp = self.workload.lengths, layout.parallelism.pp
        p, r, each = lengths.prompts, lengths.responses, samples.per_prompt
        tokens = p.mean / each + r.mean
        pairs = (p.mean_square + p.mean) / 2 / each + r.mean * p.mean + (r.mean_square + r.mean) / 2
        least = min(share, self.cluster.software.micro_batches_per_stage * pp) if pp > 1 else 1
        count = max(least, min(share, ceil(share * tokens / budget)))
        return Micro(share * tokens, share * pairs, share * r.mean) / count, count

    def _running(self, role: str, layout: Layout, share: int) -> int:
        """Samples that an instance decodes at a time."""
        workload, sizes = self.workload, layout.parallelism
        each = ceil(workload.lengths.prompts.mean + workload.lengths.responses.mean)
        running = min(share, workload.max_running)
        if workload.kv_tokens is not None:
            running = min(running, workload.kv_tokens // each)
        if pool := self.cluster.software.pool_share:
            held = max(self._held(role, Parallelism(1, sizes.tp, sizes.pp, sizes.stages), False))
            room = pool * self.cluster.device.memory_bytes - held - self._reserved_bytes
            running = min(running, int(room / (each * max(self._token_bytes(role, layout)))))
        return max(1, running)

    # Bytes

    def _forward_bytes(self, node: Node, layout: Layout, budget: int, *, train: bool) -> tuple[int, ...]:
        role, sizes, workload = str(node.role), layout.parallelism, self.workload
        shape, width = self.shapes[role], BYTES[workload.dtype]
        samples = workload.samples_of(self.flow, node)
        batch = LargestBatch.fitting(
            ceil(samples.prompts / sizes.dp),
            samples.per_prompt,
            workload.lengths.prompts.longest,
            workload.lengths.responses.longest,
            budget,
        )
        whole = activation_bytes(
            shape, batch, width, fused=workload.fused, checkpointed=workload.checkpoint_activations
        )
        bounds = stage_bounds(shape.layers, sizes)
        found = []
        for stage in range(sizes.pp):
            kept = (sizes.pp - stage) * (bounds[stage + 1] - bounds[stage]) if train else 1
            here = int(kept / shape.layers / sizes.tp * whole)
            if stage == sizes.pp - 1 and role not in SCALAR_ROLES:
                trained = train and workload.lora_rank == 0
                here += logits_bytes(shape, width) + (head_gradient_bytes(shape, width) if trained else 0)
            found.append(here)
        return tuple(found)

    def _cache_bytes(self, role: str, layout: Layout, running: int) -> tuple[int, ...]:
        lengths, sizes = self.workload.lengths, layout.parallelism
        context = lengths.prompts.longest + lengths.responses.longest
        tokens = held_tokens(running, context, self.workload.kv_tokens)
        packs = self.workload.packed and sizes.tp * sizes.pp == 1
        copied = packed_bytes(self.shapes[role], self.workload.dtype) if packs else 0
        return tuple(tokens * each + copied for each in self._token_bytes(role, layout))

    def _token_bytes(self, role: str, layout: Layout) -> tuple[int, ...]:
        """Keys and values of a token on a device of each stage."""
        shape, sizes = self.shapes[role], layout.parallelism
        heads = Heads(shape.heads, shape.kv_heads, shared=True)
        most = max(stop - first for first, stop in (heads.part_range(i, sizes.tp) for i in range(sizes.tp)))
        bounds = stage_bounds(shape.layers, sizes)
        per_layer = 2 * most * shape.head_dim * BYTES[self.workload.dtype]
        return tuple((stop - start) * per_layer for start, stop in itertools.pairwise(bounds))

    def _tp_bytes(self, passes: Passes, micro: Micro, layout: Layout) -> int:
        """That the devices of one copy receive in one forward of a micro-batch: sums over tp, and hops."""
        sizes, row = layout.parallelism, micro.tokens * passes.work.shape.hidden * passes.work.width
        sums = 2 * 2 * (sizes.tp - 1) * row * passes.work.shape.layers
        return int(sums + (sizes.pp - 1) * sizes.tp * row)

    # Weights

    def _move(self, role: str, source: Layout, target: Layout) -> MoveCost:
        found = move_cost(self._parameters(role), source, target, self.workload.dtype, self.cluster)
        return found.times(self._ratios.get("move", 1.0))

    def _offload(self, role: str, layout: Layout, what: Literal["weights", "state"]) -> MoveCost:
        sizes = layout.parallelism
        weights = self._held(role, sizes, False)
        if what == "weights":
            each = weights
        else:
            per = parameter_bytes(self.workload.dtype, trained=True)
            each = tuple(-(-n // sizes.dp) * (per.masters + per.moments) for n in self._trained_elements(role, sizes))
        host = self.cluster.host
        terms = {"copies": host.latency_s + max(each) / (host.bandwidth * self.cluster.software.links)}
        return MoveCost(total(terms), terms, sum(each) * sizes.dp * sizes.tp)

    def _held_of(self, role: str, sizes: Parallelism, trained: bool) -> tuple[int, ...]:
        parameters, width = self._parameters(role), BYTES[self.workload.dtype]
        followed = self.workload.follows and role == "actor"
        found = []
        for stage in range(sizes.pp):
            most = 0
            for tp in range(sizes.tp):
                held = shard(parameters, sizes, tp, stage).num_elements * width
                if trained:
                    ends = {0, sizes.dp - 1}
                    held += max(
                        optimizer_bytes(parameters, sizes, tp, stage, dp, self.workload.dtype, followed=followed)
                        for dp in ends
                    )
                most = max(most, held)
            found.append(most)
        return tuple(found)

    def _trained_elements(self, role: str, sizes: Parallelism) -> tuple[int, ...]:
        """Trained elements of a device of each stage, before dp divides them."""
        return tuple(
            shard(self._parameters(role), sizes, 0, stage, once=True).num_elements for stage in range(sizes.pp)
        )

    def _parameters_of(self, role: str) -> Parameters:
        if role in self._given:
            return self._given[role]
        return parameters_of_shape(self.shapes[role], 1 if role in SCALAR_ROLES else None)

    def _passes_of(self, role: str, layout: Layout) -> Passes:
        shape = self.shapes[role]
        outputs = 1 if role in SCALAR_ROLES else shape.vocabulary
        return Passes(self.cluster, ModelWork(shape, self.workload.dtype, outputs), layout, self._profile)
