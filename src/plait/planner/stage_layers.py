"""How a model's layers are split into pipeline stages, by dynamic programming: unequal layers, ends of their own,
memory, and devices of several kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf


@dataclass(frozen=True)
class StageDevices:
    """room_bytes: for layers; speed: what takes a second at 1 takes half of one at 2; layer_s: seconds of each layer at
    speed 1, where unlike layers differ more on some devices than on others; empty: as of all"""

    room_bytes: float = inf
    speed: float = 1.0
    layer_s: Sequence[float] = ()


def cut_layers(
    layer_s: Sequence[float],
    num_stages: int,
    *,
    first_s: float = 0.0,
    last_s: float = 0.0,
    layer_bytes: Sequence[float] = (),
    devices: Sequence[StageDevices] = (),
) -> tuple[int, ...] | None:
    """Layers of each stage, so that the slowest stage takes as little as can be; of such cuts the one that takes least
    in the sum of squares, and of those the one with the later stages larger.

    Pipe-RLHF's stage search: A[k][j] = min over i < j of max(A[k - 1][i], time(i … j)), subject to memory.

    Args:
        layer_s: seconds (or any measure of work) of each layer.
        num_stages: at least 1.
        first_s: what the first stage does besides: the embedding.
        last_s: what the last stage does besides: the head.
        layer_bytes: that each layer holds; empty: nothing.
        devices: of each stage; empty: all are alike and have room for any layers.

    Returns:
        None where no cut leaves every stage a layer and fits.
    """
    layers = len(layer_s)
    if num_stages > layers:
        return None
    on = devices or [StageDevices()] * num_stages
    seconds = [[0.0, *accumulate(stage.layer_s or layer_s)] for stage in on]
    bytes_before = [0.0, *accumulate(layer_bytes or [0.0] * layers)]

    def stage(number: int, start: int, stop: int) -> float:
        if bytes_before[stop] - bytes_before[start] > on[number].room_bytes:
            return inf
        extra = (first_s if number == 0 else 0.0) + (last_s if number == num_stages - 1 else 0.0)
        return (seconds[number][stop] - seconds[number][start] + extra) / on[number].speed

    best: list[tuple[float, float, tuple[int, ...]] | None] = [(0.0, 0.0, ())] + [None] * layers
    for number in range(num_stages):
        after: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (layers + 1)
        for stop in range(number + 1, layers - (num_stages - 1 - number) + 1):
            shortest: tuple[float, float, tuple[int, ...]] | None = None
            for start in range(stop - 1, number - 1, -1):
                mine = stage(number, start, stop)
                if mine == inf or (shortest is not None and mine > shortest[0]):
                    break  # with more layers it takes no less
                before = best[start]
                if before is None:
                    continue
                cut = (max(before[0], mine), before[1] + mine * mine, (*before[2], stop - start))
                if shortest is None or cut < shortest:
                    shortest = cut
            after[stop] = shortest
        best = after
    return None if best[layers] is None else best[layers][2]  # type: ignore[index]
