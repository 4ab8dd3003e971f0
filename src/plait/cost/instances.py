"""Instances that generate: their devices, the samples that each has and runs, and how it decodes. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import ceil

from plait.cost.cluster import ClusterSpec
from plait.cost.decoding import Decoding, Drafting, dealt
from plait.cost.layer_times import LayerTimes, total
from plait.cost.model_work import ModelWork
from plait.cost.passes import Passes
from plait.cost.profile import Profile
from plait.cost.workload import Samples, Workload
from plait.layout.mesh import Layout, Mesh, Parallelism
from plait.models.shape import ModelShape
from plait.policy.decode_ring import COSTS, GroupRule


class Instances:
    """
    Args:
        shapes: role → the shape of its model.
        passes: of a role over the layout of an instance, and that of all instances.
        held_bytes: of a role's weights on a device of each stage.
        token_bytes: of a token's keys and values there.
        profile: as of `ModelCosts`.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: ClusterSpec,
        shapes: Mapping[str, ModelShape],
        passes: Callable[[str, Layout, Layout], Passes],
        held_bytes: Callable[[str, Parallelism], tuple[int, ...]],
        token_bytes: Callable[[str, Layout], tuple[int, ...]],
        profile: Profile | None,
    ) -> None:
        self._workload, self._cluster, self._shapes, self._profile = workload, cluster, shapes, profile
        self._passes, self._held, self._token_bytes = passes, held_bytes, token_bytes
        self._measured_groups = cache(self._measured_groups_of)
        self.shares = cache(self._shares_of)
        """See `_shares_of`."""

    def decoding(self, role: str, instance: Layout, layout: Layout, groups: Callable[[int], int]) -> Decoding:
        """How an instance decodes, of all those of a layout."""
        passes, drafting = self._passes(role, instance, layout), self.drafting(instance, layout)
        return Decoding(passes, self._workload.lengths.prompts.mean, groups, drafting)

    def _shares_of(self, samples: Samples, count: int) -> list[tuple[int, ...]]:
        """Response lengths of each of so many instances."""
        return dealt(self._workload.lengths.responses.of(samples.count), samples.per_prompt, count)

    def kinds(self, layout: Layout, count: int) -> list[tuple[Layout, Sequence[int]]]:
        """For each kind of device among the first `count` instances: the layout of one of them, and the numbers of all
        instances on that kind."""
        copies = self._cluster.copies_of(layout)
        if not copies:
            return [(_instance(layout), range(count))]
        return [(copy, some) for copy, numbers in copies if (some := [n for n in numbers if n < count])]

    def drafting(self, instance: Layout, layout: Layout) -> Drafting:
        """A draft model is whole on one device of each instance."""
        workload, count = self._workload, layout.parallelism.dp
        shape = workload.draft_model
        if workload.drafts_whole and len(layout.mesh.ranks) > count:
            return Drafting()
        if shape is None:
            return Drafting(workload.drafts)
        work = ModelWork(shape, workload.dtype, shape.vocabulary)
        ranks = layout.mesh.ranks
        devices = Layout(Mesh(ranks[:count]), Parallelism(count))
        alone = Layout(Mesh(instance.mesh.ranks[:1]), Parallelism())
        cluster = self._cluster.among(alone.mesh.ranks)
        return Drafting(workload.drafts, Passes(LayerTimes(cluster, work, alone, self._profile, devices)))

    def groups(self, role: str, layout: Layout, most: int) -> Callable[[int], int]:
        """Groups of samples that go round the stages of an instance at the same time, of so many that run.

        Args:
            most: samples that run at once.
        """
        stages, stated = layout.parallelism.pp, self._workload.stated_groups
        per_stage = self._cluster.software.decode_groups_per_stage
        if per_stage is not None:
            stated = per_stage * stages
        elif stated is None and self._profile is not None and stages > 1:
            stated = self._measured_groups(role, layout, most)
        return GroupRule(stages, COSTS[self._workload.device], stated).groups

    def _measured_groups_of(self, role: str, layout: Layout, running: int) -> int:
        """The number with the shortest round of so many samples that have said half of what they say, the fewest among
        equals; as `decode_ring.num_groups`, by the seconds of stages and hops."""
        lengths, passes = self._workload.lengths, self._passes(role, _instance(layout), layout)

        def round_s(count: int) -> float:
            decoding = Decoding(passes, lengths.prompts.mean, lambda _: count, self.drafting(_instance(layout), layout))
            return total(decoding.step(running, running * lengths.responses.mean / 2))

        counts = range(1, min(running, layout.parallelism.pp + 1) + 1)
        return min(counts, key=lambda count: (round_s(count) * (1 + 1e-12 * count), count))

    def running(self, role: str, layout: Layout, share: int, held_bytes: int | None = None) -> int:
        """Samples that an instance decodes at a time. `held_bytes` as of `cost`."""
        workload, sizes = self._workload, layout.parallelism
        root = 0 if self._shapes[role].recurrent else workload.held_root
        own_tokens = ceil(workload.lengths.prompts.mean + workload.lengths.responses.mean) - root
        running = min(share, workload.max_running)
        if workload.kv_tokens is not None:
            running = min(running, (workload.kv_tokens - root) // own_tokens)
        if pool := self._cluster.software.pool_share:
            if held_bytes is None:
                held_bytes = max(self._held(role, Parallelism(1, sizes.tp, sizes.pp, sizes.stages)))
            room = pool * self._cluster.among(layout.mesh.ranks).device.memory_bytes - held_bytes
            of_token = max(1, *self._token_bytes(role, layout))
            running = min(running, int((room / of_token - root) / own_tokens))
        return max(1, running)


def _instance(layout: Layout) -> Layout:
    """The first of its copies."""
    sizes = layout.parallelism
    ranks = layout.mesh.ranks[: sizes.tp * sizes.pp]
    return Layout(Mesh(ranks), Parallelism(1, sizes.tp, sizes.pp, sizes.stages))
