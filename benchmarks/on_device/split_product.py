"""A product of few rows by Triton: each program reads a tile of the weight once, and where tiles are few, their input
features are dealt out to several programs, of which the last to arrive adds the parts up, in their order.

Imports triton; TRITON_INTERPRET=1 runs it on a CPU. Shapes: T rows, I input and O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS_OF_SM = 2
MOST_SPLITS = 16
FEW_ROWS, MANY_ROWS = 16, 64
"""Rows of a tile."""


@dataclass(frozen=True)
class Tile:
    """What a program takes at a time: outputs, inputs; how many such are on their way; its warps."""

    outputs: int
    inputs: int
    stages: int
    warps: int = 4


TILES = {
    FEW_ROWS: (Tile(32, 128, 5), Tile(64, 128, 4)),
    MANY_ROWS: (Tile(64, 64, 5), Tile(128, 64, 4)),
}


@triton.jit(do_not_specialize=["num_rows", "splits"])
def multiply(
    x,
    weight,
    out,
    parts,
    arrived,
    num_rows,
    num_outputs,
    num_inputs,
    splits,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Grid (⌈T / ROWS⌉ · ⌈O / OUTPUTS⌉, splits). `parts` float32 [splits, T, O], `arrived` int32 of each tile, 0
    before and behind it; both where SPLIT. WIDE: products in float32, for the interpreter."""
    tiles = tl.cdiv(num_rows, ROWS)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    row_T = (tile % tiles) * ROWS + tl.arange(0, ROWS)
    out_O = (tile // tiles) * OUTPUTS + tl.arange(0, OUTPUTS)
    steps = tl.cdiv(tl.cdiv(num_inputs, INPUTS), splits)
    from_input = part * steps * INPUTS
    to_input = tl.minimum(from_input + steps * INPUTS, num_inputs)
    total_TO = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for at in range(from_input, to_input, INPUTS):
        in_I = at + tl.arange(0, INPUTS)
        x_TI = tl.load(
            x + row_T[:, None] * num_inputs + in_I[None, :],
            mask=(row_T < num_rows)[:, None] & (in_I < num_inputs)[None, :],
            other=0.0,
        )
        weight_OI = tl.load(
            weight + out_O[:, None].to(tl.int64) * num_inputs + in_I[None, :],
            mask=(out_O < num_outputs)[:, None] & (in_I < num_inputs)[None, :],
            other=0.0,
        )
        if WIDE:
            x_TI, weight_OI = x_TI.to(tl.float32), weight_OI.to(tl.float32)
        total_TO += tl.dot(x_TI, tl.trans(weight_OI), input_precision="ieee")
    at_TO = row_T[:, None].to(tl.int64) * num_outputs + out_O[None, :]
    is_in = (row_T < num_rows)[:, None] & (out_O < num_outputs)[None, :]
    if SPLIT:
        tl.store(parts + part.to(tl.int64) * num_rows * num_outputs + at_TO, total_TO, mask=is_in)
        tl.debug_barrier()  # what other threads of the program have stored
        if tl.atomic_add(arrived + tile, 1) == splits - 1:
            total_TO = tl.zeros([ROWS, OUTPUTS], tl.float32)
            of_part = parts
            for _ in range(splits):
                total_TO += tl.load(of_part + at_TO, mask=is_in, other=0.0, cache_modifier=".cg")
                of_part += num_rows * num_outputs
            tl.store(out + at_TO, total_TO.to(out.dtype.element_ty), mask=is_in)
            tl.store(arrived + tile, 0)
    else:
        tl.store(out + at_TO, total_TO.to(out.dtype.element_ty), mask=is_in)


INTERPRETED = not isinstance(multiply, triton.JITFunction)
"""Whether Triton's interpreter runs the program."""


def ways(rows: int) -> Sequence[Callable[[Tensor, Tensor], Tensor]]:
    """Products of so many rows by each tile that is tried."""
    tile_rows = FEW_ROWS if rows <= FEW_ROWS else MANY_ROWS
    return [partial(product, tile_rows, tile) for tile in TILES[tile_rows]]


def product(tile_rows: int, tile: Tile, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """[T, O] in the dtype of both, which are contiguous."""
    (num_rows, inputs), outputs = x_TI.shape, len(weight_OI)
    tiles = -(-num_rows // tile_rows) * -(-outputs // tile.outputs)
    splits = splits_of(tiles, -(-inputs // tile.inputs), programs_for(x_TI.device))
    out = x_TI.new_empty(num_rows, outputs)
    parts, arrived = out, out
    if splits > 1:
        parts = torch.empty(splits, num_rows, outputs, dtype=torch.float32, device=out.device)
        arrived = arrivals(out.device)
    multiply[(tiles, splits)](  # type: ignore[index]
        x_TI, weight_OI, out, parts, arrived, num_rows, outputs, inputs, splits,
        ROWS=tile_rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs, SPLIT=splits > 1, WIDE=INTERPRETED,
        num_stages=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out


def splits_of(tiles: int, steps: int, programs: int) -> int:
    """Into how many parts the steps of a tile are dealt: no more than fill a device, and of two steps at least."""
    room = max(1, programs // tiles)
    return max(1, min(1 << (room.bit_length() - 1), steps // 2, MOST_SPLITS))


@cache
def programs_for(device: torch.device) -> int:
    """Programs that fill a device."""
    if device.type != "cuda":
        return 2 * PROGRAMS_OF_SM
    return PROGRAMS_OF_SM * torch.cuda.get_device_properties(device).multi_processor_count


@cache
def arrivals(device: torch.device) -> Tensor:
    """Programs of each tile that have arrived: there are fewer tiles than programs where they are split."""
    return torch.zeros(programs_for(device), dtype=torch.int32, device=device)
