"""Seconds and bytes of an optimizer step of a role that is trained in a layout, and of gathering the weights that its
ranks share. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from plait.cost.layer_times import Terms
from plait.cost.passes import Passes
from plait.training.memory import BYTES, parameter_bytes

GATHERED = "gathered weights"
"""The term of weights that ranks of dp share, and gather to compute with."""


def optimizer_step(
    passes: Passes, elements: Sequence[int], sums: int, *, updates: bool = True, in_turn: int = 0, gathers: bool = True
) -> tuple[Terms, int]:
    """Gradients are summed over dp (`sums` times), each device updates its range, new weights are gathered.

    Args:
        passes: of the role, by the slowest devices of each stage.
        elements: that are trained, on a device of each stage, before dp divides them.
        updates: else gradients are left to another call's step, and are only summed.
        in_turn: sums that the first stage waits for before its own: each micro-batch is summed where it is, stage by
            stage.
        gathers: else each device keeps the new weights of its range alone.
    """
    times = passes.times
    sizes, per = times.layout.parallelism, parameter_bytes(times.work.dtype, trained=True)
    most, profile = max(elements), times.profile
    passed = 2 * (per.masters + per.moments) + (per.weights if per.masters else 0)
    of_each = passed + per.gradients
    terms: Terms = {}
    if not updates:
        pass
    elif profile is not None and profile.optimizer_s is not None:
        terms = {"optimizer": most / sizes.dp * profile.optimizer_s * times.contention}
    elif passes.stages:
        parts = zip(elements, passes.stages, strict=True)
        terms = {"optimizer": max(count / sizes.dp * of_each / stage.bytes_per_s for count, stage in parts)}
    else:
        terms = {"optimizer": most / sizes.dp * of_each / times.bytes_per_s}
    if sizes.dp > 1:
        terms["gradients"] = (sums + in_turn) * times.traffic.gather("dp", most * per.gradients)
        if updates and gathers:
            terms["new weights"] = times.traffic.gather("dp", most * per.weights)
    sent = sums * per.gradients + (updates and gathers) * per.weights
    received = (sizes.dp - 1) / sizes.dp * sent * sizes.dp * sizes.tp
    return terms, int(received * sum(elements))


def gathering_of(passes: Passes, elements: Sequence[int], times: int, in_turn: int) -> tuple[Terms, int]:
    """Cost of gathering weights that are sharded over dp `times` times, from the ranks that hold them to all others;
    zero where each dp rank has all of them.

    Args:
        elements: of weights, on a device of each stage, before dp shares them.
        in_turn: times more that a stage waits for others.
    """
    layout, width = passes.times.layout, BYTES[passes.times.work.dtype]
    if not layout.shards_weights:
        return {}, 0
    seconds = (times + in_turn) * passes.times.traffic.broadcast("dp", max(elements) * width)
    sizes = layout.parallelism
    return {GATHERED: seconds}, times * (sizes.dp - 1) * sizes.tp * sum(elements) * width
