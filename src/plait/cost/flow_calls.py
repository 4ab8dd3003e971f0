"""The calls of a flow, and what a workload has each of them make or read. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.cost.call_lengths import lengths_by_call
from plait.cost.lengths import SampleLengths
from plait.cost.workload import Samples, Workload
from plait.dataflow import Dataflow
from plait.models.shape import ModelShape


@dataclass(frozen=True, eq=False)
class FlowCalls:
    """
    shapes:  role → the shape of its model
    samples: id of a call → the rows that it reads
    lengths: id of a call → their tokens
    """

    workload: Workload
    shapes: Mapping[str, ModelShape]
    flow: Dataflow
    samples: Mapping[int, Samples]
    lengths: Mapping[int, SampleLengths]

    @classmethod
    def of(cls, workload: Workload, shapes: Mapping[str, ModelShape], flow: Dataflow) -> FlowCalls:
        samples = {node.id: workload.samples_of(flow, node) for node in flow.nodes}
        return cls(
            workload, shapes, flow, samples, lengths_by_call(flow, workload.lengths, workload.samples_per_prompt)
        )
