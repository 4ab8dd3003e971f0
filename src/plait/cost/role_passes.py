"""Passes of the models of a flow, by the devices that layouts are on. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from plait.cost.cluster import ClusterSpec
from plait.cost.layer_times import LayerTimes
from plait.cost.model_work import ModelWork
from plait.cost.passes import Passes
from plait.cost.profile import Profile
from plait.dataflow import Dataflow
from plait.layout.mesh import Layout
from plait.models.lora_settings import NO_LORA, LoraSettings
from plait.models.shape import ModelShape
from plait.recipes.role_models import is_scalar


def work_of_roles(
    shapes: Mapping[str, ModelShape],
    flow: Dataflow,
    dtype: str,
    lora: LoraSettings,
    frozen: Mapping[str, LoraSettings],
) -> dict[str, ModelWork]:
    """Role → the work of its model, with an adapter where it has one.

    Args:
        shapes: as of `ModelCosts`; lora, frozen: as of `Workload`.
    """
    return {
        role: ModelWork(
            shape,
            dtype,
            1 if is_scalar(role) else shape.vocabulary,
            lora if role in flow.trained_roles else frozen.get(role, NO_LORA),
        )
        for role, shape in shapes.items()
    }


class RolePasses:
    """Kept by instance: a search asks for the same again and again.

    Args:
        works: as of `work_of_roles`.
        profile: as of `ModelCosts`.
    """

    def __init__(self, works: Mapping[str, ModelWork], cluster: ClusterSpec, profile: Profile | None) -> None:
        self._works, self._cluster, self._profile = works, cluster, profile
        self.of = cache(self._of)
        self.copies = cache(self._copies)

    def _of(self, role: str, layout: Layout, devices: Layout | None = None, copy: Layout | None = None) -> Passes:
        """Those of a role over a layout.

        Args:
            devices: as of `LayerTimes`.
            copy: of the layout, by whose devices; None: by the slowest of all copies, stage by stage.
        """
        mine = copy or layout
        clusters = (self._cluster.among(mine.mesh.ranks), *self._cluster.stages_of(mine))
        work, profile = self._works[role], self._profile
        times, *stages = (LayerTimes(cluster, work, layout, profile, devices) for cluster in clusters)
        return Passes(times, stages)

    def _copies(self, role: str, layout: Layout) -> tuple[Passes, ...]:
        """Those of the copies of a layout that are unlike each other in their devices. All copies have as many samples,
        and wait for the slowest."""
        copies = self._cluster.copies_of(layout)
        if not copies:
            return (self.of(role, layout),)
        return tuple(self.of(role, layout, None, copy) for copy, _ in copies)
