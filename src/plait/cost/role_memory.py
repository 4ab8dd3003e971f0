"""Weights and optimizer state of a role on the devices of each pipeline stage of a layout. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from plait.cost.held_memory import most_shared, state_bytes
from plait.cost.shape_parameters import adapter_by_stage
from plait.cost.workload import Workload
from plait.layout.adapters import parameters_of_adapter
from plait.layout.mesh import Parallelism
from plait.layout.params import Parameters
from plait.layout.shards import elements_by_stage, gathered_elements, stage_elements, stage_largest
from plait.models.shape import ModelShape
from plait.training.memory import BYTES, parameter_bytes


class RoleMemory:
    """Kept by instance: a search asks for the same again and again.

    Args:
        shapes: role → the shape of its model; parameters: → its parameters.
    """

    def __init__(
        self, workload: Workload, shapes: Mapping[str, ModelShape], parameters: Callable[[str], Parameters]
    ) -> None:
        self._workload, self._shapes, self._parameters = workload, shapes, parameters
        self._elements = cache(self._elements_of)
        self._adapter = cache(self._adapter_of)
        self._held = cache(self._held_of)
        self.gathered = cache(self._gathered_of)
        self.trained_parameters = cache(self._trained_parameters_of)

    def held(self, role: str, sizes: Parallelism, trained: bool, shares: bool = False) -> tuple[int, ...]:
        """By stage, in bytes: of the device with most of them, weights, and with `trained` masters, moments and
        gradients.

        Args:
            shares: ranks of dp share the weights.
        """
        return self._held(role, sizes, trained, shares)

    def _gathered_of(self, role: str, sizes: Parallelism) -> tuple[int, ...]:
        """By stage, in bytes, of the device with most: room for shared weights that are gathered."""
        rooms = zip(*(gathered_elements(self._parameters(role), sizes, tp) for tp in range(sizes.tp)), strict=True)
        return tuple(max(of_stage) * BYTES[self._workload.dtype] for of_stage in rooms)

    def elements(self, role: str, sizes: Parallelism) -> tuple[int, ...]:
        """Elements of weights on a device of each stage, before dp shares them."""
        return tuple(count for count, _ in stage_elements(self._parameters(role), sizes, 0))

    def trained_elements(self, role: str, sizes: Parallelism) -> tuple[int, ...]:
        """Trained elements of a device of each stage, before dp divides them: of an adapter, where there is one."""
        if self._workload.lora.rank:
            return self._adapter(role, sizes)
        return tuple(once for _, once in stage_elements(self._parameters(role), sizes, 0))

    def _trained_parameters_of(self, role: str) -> Parameters:
        """What training changes of a role: all parameters, or its adapter alone."""
        lora, parameters = self._workload.lora, self._parameters(role)
        if not lora.rank:
            return parameters
        return parameters_of_adapter(parameters, lora.rank, lora.linear, lora.experts)

    def _held_of(self, role: str, sizes: Parallelism, trained: bool, shares: bool) -> tuple[int, ...]:
        workload, dtype = self._workload, self._workload.dtype
        followed, sharded = workload.follows and role == "actor", role in workload.sharded
        adapted, of_adapter = workload.lora.rank > 0, parameter_bytes(dtype, trained=True).total
        largest = []
        by_stage = self._elements(role, sizes.tp, sizes.pp, sizes.stages)
        first = max(count for count, _ in by_stage[0])
        of_ways = [stage_largest(self._parameters(role), sizes, tp) for tp in range(sizes.tp)]
        for stage, (parts, adapter) in enumerate(zip(by_stage, self._adapter(role, sizes), strict=True)):
            counts = [count for count, _ in parts]
            if shares:
                counts = [most_shared(part, sizes.dp, first if stage else 0) for part in parts]
            held = [count * BYTES[dtype] for count in counts]
            if trained and adapted:
                held = [num_bytes + adapter * of_adapter for num_bytes in held]
            elif trained:
                how = {"followed": followed, "sharded": sharded, "first": first if stage else 0}
                how["largest"] = max(of_layers[stage] for of_layers in of_ways)
                held = [
                    num_bytes + state_bytes(part, sizes.dp, dtype, **how)
                    for num_bytes, part in zip(held, parts, strict=True)
                ]
            largest.append(max(held))
        return tuple(largest)

    def _elements_of(self, role: str, tp: int, pp: int, stages: tuple[int, ...]) -> tuple[set[tuple[int, int]], ...]:
        """What the devices of each stage hold: elements of weights, and of those that are trained there."""
        return elements_by_stage(self._parameters(role), Parallelism(1, tp, pp, stages))

    def _adapter_of(self, role: str, sizes: Parallelism) -> tuple[int, ...]:
        """Elements of a role's adapter on a device of each stage; 0: it has none."""
        return adapter_by_stage(self._shapes[role], self._workload.lora, sizes)
