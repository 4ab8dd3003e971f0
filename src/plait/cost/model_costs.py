"""The cost model: seconds and bytes of every call of a flow, from shapes, a workload and a cluster (`costs.Costs`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import ceil
from typing import Literal

from plait.cost.cluster import ClusterSpec
from plait.cost.connections import Connections, heads_of_keys
from plait.cost.corrections import Corrections
from plait.cost.costs import Amount, CallCost, MoveCost, Spread, num_instances
from plait.cost.flow_calls import FlowCalls
from plait.cost.forward_memory import ForwardMemories, ForwardMemory
from plait.cost.generations import Generations
from plait.cost.layer_kinds import layer_kinds
from plait.cost.layer_times import BALANCING, added, scaled, total
from plait.cost.micro_batch import share_of
from plait.cost.micro_batch_split import MicroBatchSplit
from plait.cost.moves import move_cost, offload_cost
from plait.cost.optimizer_step import gathering_of, optimizer_step
from plait.cost.profile import Profile
from plait.cost.role_memory import RoleMemory
from plait.cost.role_passes import RolePasses, work_of_roles
from plait.cost.row_traffic import generated_bytes, rows_traffic, scored_bytes, trained_bytes
from plait.cost.sample_sets import SampleSets
from plait.cost.shape_parameters import parameters_of_shape
from plait.cost.wide_columns import numbers_read, numbers_scored
from plait.cost.working_memory import NCCL, Expected, keeps_freed, process_terms, slack_terms
from plait.cost.workload import Workload
from plait.dataflow import Dataflow, Node
from plait.layout.mesh import Layout
from plait.layout.params import Parameters
from plait.models.shape import ModelShape
from plait.recipes.role_models import is_scalar
from plait.schedule.plan import Mode
from plait.training.memory import BYTES, parameter_bytes


class ModelCosts:
    """`costs.Costs` by formulas.

    Args:
        shapes: role → the shape of its model; of a role that is none (reward functions), nothing.
        parameters: role → its parameters, where a model's own are known; else those of a decoder of its shape.
        profile: what a machine was measured to do, in place of the device's numbers; the cluster is then
            `profile.cluster(devices)`. Calls and moves take as many times as long as in the runs that it knows
            (`corrections`).
    """

    def __init__(
        self,
        workload: Workload,
        shapes: Mapping[str, ModelShape],
        flow: Dataflow,
        cluster: ClusterSpec,
        *,
        parameters: Mapping[str, Parameters] | None = None,
        profile: Profile | None = None,
    ) -> None:
        self.cluster, self.pool_takes_rest = cluster, cluster.software.pool_share > 0
        self.workload, self.shapes, self.flow = workload, dict(shapes), flow
        self.process_terms = process_terms(workload.device, cluster.num_devices)
        self.keeps_freed = keeps_freed(workload.device)
        several = workload.device != "cpu" and cluster.num_devices > 1
        connections = Connections(cluster.mesh_cluster, cluster.num_devices, heads_of_keys(shapes))
        self.connections = connections if several and not self.pool_takes_rest else None
        if several and self.pool_takes_rest:  # another system, whose groups nobody knows
            self.process_terms |= {NCCL: self.process_terms[NCCL] + connections.usual_bytes}
        self._nodes = {node.call: node for node in flow.nodes}
        self.engine_bytes, self._profile = workload.engine_bytes, profile
        self.corrections = Corrections({} if profile is None else profile.ratios(cluster.num_devices))
        given = dict(parameters or {})
        # Kept by instance: a search asks for the same again and again.
        self.call = cache(self._call)
        self.generation = cache(self._generation)
        self.move = cache(self._move)
        self.offload = cache(self._offload)
        outputs = lambda role: 1 if is_scalar(role) else None
        self._parameters = cache(lambda role: given.get(role) or parameters_of_shape(self.shapes[role], outputs(role)))
        calls = FlowCalls.of(workload, self.shapes, flow)
        self._samples, self._lengths = calls.samples, calls.lengths
        self._sets, self._split = SampleSets(calls), MicroBatchSplit(calls, cluster.software)
        self._forwards = ForwardMemories(calls, self._split, self._sets)
        self._memory = RoleMemory(workload, self.shapes, self._parameters)
        works = work_of_roles(shapes, flow, workload.dtype, workload.lora, workload.frozen)
        role_passes = RolePasses(works, cluster, profile)
        self._passes, self._copies = role_passes.of, role_passes.copies
        held = lambda role, sizes: self._memory.held(role, sizes, False)
        self._generations = Generations(workload, cluster, self.shapes, self._passes, held, profile)

    def _call(
        self,
        call: str,
        mode: Mode,
        layout: Layout,
        *,
        micro_batch_tokens: int | None = None,
        schedule: str = "",
        spread: Spread | None = None,
    ) -> CallCost:
        node = self._nodes[call]
        if node.role not in self.shapes:
            return self._functions(node)
        budget = micro_batch_tokens or self.workload.micro_batch_tokens
        match mode:
            case "train":
                cost = self._train(node, layout, budget, schedule)
            case "score":
                cost = self._score(node, layout, budget)
            case "prefill":
                there = spread or Spread((layout,), (layout,))
                cost = self._generations.of(self._lengths[node.id]).apart.prompts(
                    str(node.role), self._samples[node.id], layout, there
                )
            case _:
                cost = self._generate(node, layout, spread or Spread((), (layout,)))
        return self._corrected(cost, "decode" if mode == "prefill" else mode, layout)

    def working_bytes(
        self, call: str, mode: Mode, layout: Layout, *, micro_batch_tokens: int | None = None, schedule: str = ""
    ) -> tuple[int, ...]:
        assert mode != "prefill", "what computing prompts elsewhere takes goes with where samples are drawn"
        node = self._nodes[call]
        if mode == "decode":
            drawing, alone = self._generations.of(self._lengths[node.id]).whole, Spread((), (layout,))
            return drawing.memory(str(node.role), self._samples[node.id], layout, alone).working
        budget = micro_batch_tokens or self.workload.micro_batch_tokens
        return self._forward_memory(node, layout, budget, schedule if mode == "train" else None).working

    def _forward_memory(self, node: Node, layout: Layout, budget: int, schedule: str | None) -> ForwardMemory:
        memory = self._forwards.of(node, layout.parallelism, budget, schedule)
        rooms = layout.shards_weights and self._memory.gathered(str(node.role), layout.parallelism)
        return memory.beside(rooms) if rooms else memory

    def _generation(self, call: str, layout: Layout, spread: Spread, held_bytes: tuple[int, ...]) -> CallCost:
        cost = self._generate(self._nodes[call], layout, spread, held_bytes)
        return self._corrected(cost, "decode", layout)

    def _corrected(self, cost: CallCost, mode: str, layout: Layout) -> CallCost:
        correction = self.corrections.of(mode, len(layout.mesh.ranks))
        return cost if correction is None else correction.of(cost)

    def slack(
        self, *, activations: Amount, plain: Amount, weights: Amount, working: Amount, moves: bool, widened: Amount
    ) -> Mapping[str, Amount]:
        expected = Expected(activations, plain, weights, working, widened)
        return slack_terms(self.workload.device, expected, moves=moves)

    def held_bytes(self, role: str, layout: Layout, *, trained: bool) -> tuple[int, ...]:
        return self._memory.held(role, layout.parallelism, trained, layout.shards_weights)

    def moved_bytes(self, role: str) -> int:
        """What moves carry of a role that has no copy: all weights, or its adapter alone."""
        return self._memory.trained_parameters(role).num_elements * BYTES[self.workload.dtype]

    def step_line(self, call: str, layout: Layout, instances: int) -> tuple[float, float, float]:
        """See `Generating.step_line`."""
        node = self._nodes[call]
        return self._generations.of(self._lengths[node.id]).whole.step_line(
            str(node.role), self._samples[node.id], layout, instances
        )

    def stage_seconds(self, call: str, layout: Layout, micro_batches: int) -> list[tuple[float, float]]:
        node, workload = self._nodes[call], self.workload
        share = self._split.share(node, layout.parallelism.dp)
        micro, _ = self._split.micro(node, share, layout, workload.micro_batch_tokens, micro_batches)
        passes = self._passes(str(node.role), layout)
        seconds = []
        for stage in range(layout.parallelism.pp):
            forward = passes.forward(micro, stage)
            backward_s = total(passes.backward(micro, stage))
            if workload.checkpoint_activations:
                backward_s += total(forward) - forward.get("head", 0.0) - forward.get(BALANCING, 0.0)
            seconds.append((total(forward), backward_s))
        return seconds

    def stage_works(self, call: str, mode: Mode, layout: Layout) -> tuple[tuple[float, tuple[float, ...]], ...]:
        """See `planner.plan_problem.StageWorks`: by the seconds of layers."""
        node = self._nodes[call]
        role, samples, sizes = str(node.role), self._samples[node.id], layout.parallelism
        if mode in ("decode", "prefill"):
            running = ceil(samples.count / min(sizes.dp, samples.prompts))
            lengths = self._lengths[node.id]
            context = running * (lengths.prompts.mean + lengths.responses.mean / 2)
            seconds = lambda kind: total(kind.decode_layer(running, context))
        else:
            share = self._split.share(node, sizes.dp) if mode == "train" else share_of(samples.count, 1, sizes.dp)
            micro, _ = self._split.micro(node, share, layout, self.workload.micro_batch_tokens)
            seconds = lambda kind: total(kind.passed(micro))
        passes, kinds = self._passes(role, layout), layer_kinds(self.shapes[role])
        if len(kinds) == 1:
            return tuple((1 / seconds(stage), ()) for stage in passes.stages)
        works = []
        for stage in range(sizes.pp):
            layers = [0.0] * self.shapes[role].layers
            for kind, of_kind in zip(kinds, passes.kinds(stage), strict=True):
                layer_s = seconds(of_kind)
                for layer in kind.layers:
                    layers[layer] = layer_s
            mean_s = sum(layers) / len(layers)
            works.append((1 / mean_s, tuple(layer_s / mean_s for layer_s in layers)))
        return tuple(works)

    def decode_groups(self, call: str, layout: Layout, instances: int = 1) -> int:
        """Groups of samples that go round the stages of one of so many instances that share the samples of a call."""
        node = self._nodes[call]
        share = ceil(self._samples[node.id].count / instances)
        return self._generations.of(self._lengths[node.id]).whole.groups(str(node.role), layout, share)

    # Calls

    def _functions(self, node: Node) -> CallCost:
        """What reward functions take, in processes of their own beside the devices."""
        samples = self._samples[node.id].count
        terms = {"functions": ceil(samples / self.workload.workers) * self.workload.function_s}
        return CallCost(total(terms), terms)

    def _score(self, node: Node, layout: Layout, budget: int) -> CallCost:
        role, sizes, samples = str(node.role), layout.parallelism, self._samples[node.id]
        passes, copies = self._passes(role, layout), self._copies(role, layout)
        micro, count = self._split.micro(node, share := ceil(samples.count / sizes.dp), layout, budget)
        held = self._memory.elements(role, sizes)
        gathering, gathered_bytes = gathering_of(passes, held, count, sizes.pp - 1)
        terms = added(max((copy.scoring(micro, count) for copy in copies), key=total), gathering)
        whole_s = total(terms)
        sent = scored_bytes(self._lengths[node.id], samples, numbers_scored(node), self._sets.sent(node))
        terms |= rows_traffic(self.cluster, layout.mesh.ranks, sent, copies=sizes.tp * sizes.pp)
        num_bytes = passes.received_bytes(micro) * count * sizes.dp + gathered_bytes
        in_parts_s = 0.0
        if self.workload.gathers and (parts := count + self._split.small_parts(node)) > count:
            part, _ = self._split.micro(node, share, layout, budget, parts)
            parts_s = max(total(copy.scoring(part, parts)) for copy in copies)
            in_parts_s = max(0.0, parts_s - whole_s)
        cost = self._forward_memory(node, layout, budget, None).cost(terms, num_bytes, in_parts_s)
        return replace(cost, set_bytes=self._sets.held(node, layout.parallelism.dp))

    def _train(self, node: Node, layout: Layout, budget: int, schedule: str) -> CallCost:
        role, sizes, options = str(node.role), layout.parallelism, node.training
        passes, copies = self._passes(role, layout), self._copies(role, layout)
        samples = self._samples[node.id]
        mini_batches = min(options.mini_batches, samples.prompts if options.whole_groups else samples.count)
        share = self._split.share(node, sizes.dp)
        micro, count = self._split.micro(node, share, layout, budget)
        again = self.workload.checkpoint_activations
        step = max((copy.training(micro, count, recompute=again, schedule=schedule) for copy in copies), key=total)
        updates = not options.with_next
        sharded = role in self.workload.sharded or layout.shards_weights
        sums, in_turn = (count, sizes.pp - 1) if sharded else (int(updates), 0)
        elements = self._memory.trained_elements(role, sizes)
        gathers = not layout.shards_weights or self.workload.lora.rank > 0
        update, update_bytes = optimizer_step(passes, elements, sums, updates=updates, in_turn=in_turn, gathers=gathers)
        held = self._memory.elements(role, sizes)
        gathering, gathered_bytes = gathering_of(passes, held, 2 * count, 2 * (sizes.pp - 1))
        steps = mini_batches * options.epochs
        terms = scaled(added(step, update, gathering), steps)
        sent = trained_bytes(self._lengths[node.id], samples, numbers_read(node), self._sets.sent(node))
        terms |= rows_traffic(self.cluster, layout.mesh.ranks, sent, copies=sizes.tp * sizes.pp)
        moved = (1 + again) * passes.received_bytes(micro) + passes.received_bytes(micro, backward=True)
        num_bytes = steps * (moved * count * sizes.dp + update_bytes + gathered_bytes)
        cost = self._forward_memory(node, layout, budget, schedule).cost(terms, num_bytes)
        return replace(cost, set_bytes=self._sets.held(node, sizes.dp))

    def _generate(self, node: Node, layout: Layout, spread: Spread, held_bytes: Sequence[int | None] = ()) -> CallCost:
        role, samples = str(node.role), self._samples[node.id]
        drawing = self._generations.of(self._lengths[node.id])
        if spread.prompts:
            cost = drawing.apart.drawing(role, samples, layout, spread)
        else:
            cost = drawing.whole.cost(role, samples, layout, spread, held_bytes)
        ranks = sorted({rank for placed in spread.samples for rank in placed.mesh.ranks})
        sent = generated_bytes(self._lengths[node.id], samples, self._sets.sent(node))
        rows = rows_traffic(self.cluster, ranks, sent, copies=1)
        cost = replace(cost, seconds=cost.seconds + total(rows), terms={**cost.terms, **rows})
        held, held_by_all = self._sets.held(node, num_instances(spread.samples)), self._sets.held_by_all(node)
        return replace(cost, set_bytes=held, all_set_bytes=held_by_all)

    # Weights

    def _move(self, role: str, source: Layout, target: Layout) -> MoveCost:
        if self.workload.lora.rank > 0:  # adapters are whole on each rank
            source, target = source.whole, target.whole
        cluster = self.cluster.among((*source.mesh.ranks, *target.mesh.ranks))
        cost = move_cost(self._memory.trained_parameters(role), source, target, self.workload.dtype, cluster)
        return cost.times(self.corrections.move)

    def _offload(self, role: str, layout: Layout, what: Literal["weights", "state"]) -> MoveCost:
        sizes = layout.parallelism
        if what == "weights":
            stage_bytes = self._memory.held(role, sizes, False, layout.shards_weights)
        else:
            per = parameter_bytes(self.workload.dtype, trained=True)
            stage_bytes = tuple(
                -(-n // sizes.dp) * (per.masters + per.moments) for n in self._memory.trained_elements(role, sizes)
            )
        return offload_cost(self.cluster, layout, stage_bytes)
