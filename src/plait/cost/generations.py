"""What the generations of a flow take, whose samples may be of several lengths. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from plait.cost.cluster import ClusterSpec
from plait.cost.generating import Generating
from plait.cost.generating_apart import GeneratingApart
from plait.cost.generation_bytes import GenerationBytes
from plait.cost.instances import Instances
from plait.cost.lengths import SampleLengths
from plait.cost.passes import Passes
from plait.cost.prefill import Prefill
from plait.cost.profile import Profile
from plait.cost.workload import Workload
from plait.layout.mesh import Layout, Parallelism
from plait.models.shape import ModelShape


@dataclass(frozen=True)
class Generation:
    """What drawing samples of some lengths takes: where each instance computes its prompts, and where others do."""

    lengths: SampleLengths
    whole: Generating
    apart: GeneratingApart


class Generations:
    """
    Args:
        shapes: role → the shape of its model.
        passes, held_bytes: as of `Instances`.
        profile: as of `ModelCosts`.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: ClusterSpec,
        shapes: Mapping[str, ModelShape],
        passes: Callable[[str, Layout, Layout], Passes],
        held_bytes: Callable[[str, Parallelism], tuple[int, ...]],
        profile: Profile | None,
    ) -> None:
        self._workload, self._cluster, self._shapes = workload, cluster, shapes
        self._passes, self._held, self._profile = passes, held_bytes, profile
        self._known: list[Generation] = []

    def of(self, lengths: SampleLengths) -> Generation:
        """Generation of samples of these lengths."""
        known = next((generation for generation in self._known if generation.lengths == lengths), None)
        if known is None:
            known = self._of(lengths)
            self._known.append(known)
        return known

    def _of(self, lengths: SampleLengths) -> Generation:
        workload, cluster, shapes, passes, profile = (
            self._workload,
            self._cluster,
            self._shapes,
            self._passes,
            self._profile,
        )
        root = lengths.prompts.root
        workload = replace(
            workload,
            lengths=lengths,
            shared_root=min(workload.shared_root, root),
            held_root=min(workload.held_root, root),
        )
        taken = GenerationBytes(workload, cluster, shapes)
        instances = Instances(workload, cluster, shapes, passes, self._held, taken.of_token, profile)
        prefill = Prefill(workload, shapes, self._held, profile)
        return Generation(
            lengths,
            Generating(workload, passes, instances, prefill, taken),
            GeneratingApart(workload, cluster, passes, instances, prefill, taken),
        )
