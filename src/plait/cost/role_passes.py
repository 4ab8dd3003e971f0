"""Passes of the models of a flow, by the devices that layouts are on. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from plait.cost.cluster import ClusterSpec
from plait.cost.model_work import ModelWork
from plait.cost.passes import Passes
from plait.cost.profile import Profile
from plait.cost.workload import Workload
from plait.dataflow import CallKind, Dataflow
from plait.layout.mesh import Layout
from plait.models.lora_settings import NO_LORA
from plait.models.shape import ModelShape
from plait.recipes.role_models import SCALAR_ROLES


class RolePasses:
    """Kept by instance: a search asks for the same again and again.

    Args:
        shapes: role → the shape of its model.
        profile: as of `ModelCosts`.
    """

    def __init__(
        self,
        workload: Workload,
        shapes: Mapping[str, ModelShape],
        flow: Dataflow,
        cluster: ClusterSpec,
        profile: Profile | None,
    ) -> None:
        self._workload, self._shapes, self._flow = workload, shapes, flow
        self._cluster, self._profile = cluster, profile
        self.of = cache(self._of)
        self.copies = cache(self._copies)

    def _of(self, role: str, layout: Layout, devices: Layout | None = None, copy: Layout | None = None) -> Passes:
        """Those of a role over a layout.

        Args:
            devices: as of `Passes`.
            copy: of the layout, by whose devices; None: by the slowest of all copies, stage by stage.
        """
        shape, mine = self._shapes[role], copy or layout
        outputs = 1 if role in SCALAR_ROLES else shape.vocabulary
        lora = self._workload.lora if self._is_trained(role) else NO_LORA
        work = ModelWork(shape, self._workload.dtype, outputs, lora)
        cluster, stages = self._cluster.among(mine.mesh.ranks), self._cluster.stages_of(mine)
        return Passes(cluster, work, layout, self._profile, devices, stages)

    def _copies(self, role: str, layout: Layout) -> tuple[Passes, ...]:
        """Those of the copies of a layout that are unlike each other in their devices. All copies have as many samples,
        and wait for the slowest."""
        copies = self._cluster.copies_of(layout)
        if not copies:
            return (self.of(role, layout),)
        return tuple(self.of(role, layout, None, copy) for copy, _ in copies)

    def _is_trained(self, role: str) -> bool:
        return any(node.kind is CallKind.TRAIN for node in self._flow.calls(role))
