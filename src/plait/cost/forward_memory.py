"""What calls that train or score take on a device of each pipeline stage, beside weights and optimizer state.
Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from plait.cost.micro_batch import LargestBatch
from plait.cost.shape_parameters import adapter_inputs
from plait.cost.working_memory import activation_bytes, head_gradient_bytes, logits_bytes
from plait.cost.workload import Workload
from plait.layout.mesh import Parallelism
from plait.layout.shards import stage_bounds
from plait.models.shape import ModelShape
from plait.schedule.training_order import rule_named
from plait.training.memory import BYTES


@dataclass(frozen=True)
class ForwardMemory:
    """Bytes by stage. working: all of it; activations: of it; plain: of a family whose layers are not fused, these"""

    working: tuple[int, ...]
    activations: tuple[int, ...]
    plain: tuple[int, ...]


def forward_memory(
    workload: Workload,
    shape: ModelShape,
    sizes: Parallelism,
    batch: LargestBatch,
    schedule: str | None,
    *,
    scalar: bool,
) -> ForwardMemory:
    """
    Args:
        batch: the largest micro-batch.
        schedule: of a training's pipeline, by name (`training_order.rule_named`); None: of a score, which keeps one
            layer's activations at a time.
        scalar: has no head of a language model.
    """
    train, width = schedule is not None, BYTES[workload.dtype]
    kept = [1] * sizes.pp
    if schedule is not None:
        order, bounds = rule_named(schedule), stage_bounds(shape.layers, sizes)
        kept = [
            order.in_flight(stage, sizes.pp, batch.count) * (stop - start)
            for stage, (start, stop) in enumerate(pairwise(bounds))
        ]
    of_layer = {
        fused: activation_bytes(
            shape,
            batch,
            width,
            fused=fused,
            checkpointed=train and workload.checkpoint_activations,
            tp=sizes.tp,
            splits_tokens=train and workload.sequence_parallel,
            low=adapter_inputs(shape, workload.lora) if train else 0,
        )
        / shape.layers
        for fused in (workload.fused, False)
    }
    activations, plain = (tuple(int(layers * of_layer[fused]) for layers in kept) for fused in (workload.fused, False))
    head = 0
    if not scalar:
        head = logits_bytes(shape, width, workload.device, sizes.tp)
        head += head_gradient_bytes(shape, width, sizes.tp) if train and workload.lora.rank == 0 else 0
    return ForwardMemory((*activations[:-1], activations[-1] + head), activations, plain)
