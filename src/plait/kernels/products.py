"""Products with weights that `pack` laid out in panels, by vectors or by the CPU's matrix unit.

In µs on one core of an AMD EPYC (AVX-512, bfloat16), each call another weight, against oneDNN's packed products of
torch 2.13:

    [8, 576] by [576, 3072]: 78, oneDNN 161    [32, 576] by [576, 3072]: 240, oneDNN 348
    [8, 1536] by [1536, 576]: 42, oneDNN 82    [32, 1536] by [1536, 576]: 126, oneDNN 176

and on one core of an Intel Xeon with a matrix unit, by it and by vectors:

    [8, 576] by [576, 3072]: 205, 316    [32, 576] by [576, 3072]: 264, 1031    [256, 576] by [576, 3072]: 720, 7722

On one core of an AMD EPYC without AVX-512 (AVX2), in bfloat16 and in float32, against torch's float32 products:

    [8, 576] by [576, 3072]: 390, 661, torch 1101      [32, 576] by [576, 3072]: 1566, 1463, torch 2134
    [8, 1536] by [1536, 576]: 218, 340, torch 469      [32, 1536] by [1536, 576]: 792, 716, torch 912

Few rows take the time of reading the weights (15 to 17 GB/s here). Of 256 rows each panel meets eight tiles; with all
terms at once, and each tile asking for what comes next, they took 1207.

Shapes: C rows, R rows that are read, K terms, N columns, H hidden size, O outputs.
"""

from __future__ import annotations

import numpy as np

from plait.compiled import AVAILABLE, njit

if AVAILABLE:
    from plait.kernels.matrix_intrinsics import (
        GROUP_ROWS,
        MATRIX_ROWS,
        MATRIX_TERMS,
        SUM_BYTES,
        leave_unit,
        matrix_tile,
        rounded_rows,
        sums_on_stack,
        use_unit,
    )
    from plait.kernels.product_intrinsics import PREFETCH_BYTES, TILE_COLUMNS, TILE_ROWS, tile, transposed
else:
    TILE_COLUMNS, TILE_ROWS = 32, (14, 14)

PART_BLOCKS = 10
"""Blocks of terms after which the next rows have their turn: so much of a panel and of 32 rows fits into the first
level of the cache."""

STREAMED_TILES = 2
"""Tiles of rows up to which weights are asked for a little before they are used."""


@njit(nogil=True, error_model="numpy")
def product(like, x_CK, weight, widths, out_CN, num_rows, part, parts, matrix):
    """out [rows, N] = x [rows, K] · weightᵀ + bias of a weight that `pack` has laid out; this thread's panels.

    Args:
        x_CK: may be wider than K.
        weight: address.
        widths: K, N.
        out_CN: as wide as the panels, or wider.
        matrix: by the CPU's matrix unit, if it can take K.
    """
    if num_rows == 0:
        return
    num_terms, num_columns = widths
    terms = num_terms // 2 if like.itemsize == 2 else num_terms
    panel_bytes = 4 * TILE_COLUMNS * (1 + terms)
    num_panels = (num_columns + TILE_COLUMNS - 1) // TILE_COLUMNS
    first, stop = num_panels * part // parts, num_panels * (part + 1) // parts
    x_stride, out_stride = x_CK.shape[1] * like.itemsize, out_CN.shape[1] * like.itemsize
    if matrix and like.itemsize == 2 and terms % MATRIX_TERMS == 0:
        for start in range(0, num_rows, GROUP_ROWS):
            count = min(GROUP_ROWS, num_rows - start)
            x_at, out_at = x_CK.ctypes.data + start * x_stride, out_CN.ctypes.data + start * out_stride
            _by_unit(x_at, x_stride, weight, terms // MATRIX_TERMS, out_at, out_stride, count, first, stop)
        return
    most_rows = TILE_ROWS[1] if like.itemsize == 2 else TILE_ROWS[0]
    num_tiles = (num_rows + most_rows - 1) // most_rows
    for panel in range(first, stop):
        start = 0
        weight_at = weight + panel * panel_bytes
        out_at = out_CN.ctypes.data + panel * TILE_COLUMNS * like.itemsize
        for number in range(num_tiles):
            behind = (number + 1) * num_rows // num_tiles
            x_at = x_CK.ctypes.data + start * x_stride
            tile(like, behind - start, x_at, x_stride, weight_at, terms, out_at + start * out_stride, out_stride)
            start = behind


@njit(nogil=True, error_model="numpy")
def _by_unit(x, x_stride, weight, num_blocks, out, out_stride, num_rows, first_panel, stop_panel):
    """`product` in bfloat16 of up to GROUP_ROWS rows by the matrix unit.

    Tiles have as many rows each, as few as will do; the last one begins so early that it has them: rows that two tiles
    have get the same bits from both. While a part of a panel meets the tiles, each asks for its share of the next part.
    """
    sums = sums_on_stack()
    num_tiles = (num_rows + MATRIX_ROWS - 1) // MATRIX_ROWS
    rows = (num_rows + num_tiles - 1) // num_tiles
    halves = 1 if rows <= 16 else 2
    streams = num_tiles <= STREAMED_TILES
    num_parts = 1 if streams else (num_blocks + PART_BLOCKS - 1) // PART_BLOCKS
    lines = 32 if streams else (32 // num_tiles + 3) // 4 * 4
    block_bytes, column_bytes = 4 * TILE_COLUMNS * MATRIX_TERMS, 2 * TILE_COLUMNS
    use_unit(rows)
    for panel in range(first_panel, stop_panel):
        bias_at = weight + panel * (4 * TILE_COLUMNS + num_blocks * block_bytes)
        for part in range(num_parts):
            start, stop = part * num_blocks // num_parts, (part + 1) * num_blocks // num_parts
            weights_at = bias_at + 4 * TILE_COLUMNS + start * block_bytes
            ahead_at = weights_at + (PREFETCH_BYTES if streams else (stop - start) * block_bytes)
            for number in range(num_tiles):
                row = min(number * rows, num_rows - rows)
                x_at = x + row * x_stride + start * 4 * MATRIX_TERMS
                sums_at = sums + number * SUM_BYTES
                matrix_tile(
                    halves, np.int64(part > 0), x_at, x_stride, weights_at, stop - start, sums_at, ahead_at, lines
                )
                if not streams:
                    ahead_at += (stop - start) * 64 * lines
                if part == num_parts - 1:
                    out_at = out + row * out_stride + panel * column_bytes
                    rounded_rows(rows, sums_at, bias_at, out_at, out_stride)
    leave_unit()


@njit(nogil=True, error_model="numpy")
def pack(weight_OT, bias_O, first, out):
    """Lay the rows of a weight out as `tile` reads them: panels of TILE_COLUMNS outputs, in each its bias, then its
    terms one by one.

    Args:
        weight_OT: uint32 [O, T], of bfloat16 in pairs.
        bias_O: float32, or of length 0.
        first: output that row 0 is.
        out: uint32 [panels, 1 + T, TILE_COLUMNS].
    """
    num_out, num_terms = weight_OT.shape
    for row in range(len(bias_O)):
        column = first + row
        out[column // TILE_COLUMNS, 0, column % TILE_COLUMNS] = bias_O.view(np.uint32)[row]
    at, row_bytes, panel_row_bytes = weight_OT.ctypes.data, 4 * num_terms, 4 * TILE_COLUMNS
    for start in range(0, num_out, TILE_COLUMNS):
        done = 0
        if first % TILE_COLUMNS == 0 and start + TILE_COLUMNS <= num_out:
            done = num_terms // 16 * 16
            panel_at = out[(first + start) // TILE_COLUMNS, 1].ctypes.data
            for term in range(0, done, 16):
                for half in range(0, TILE_COLUMNS, 16):
                    from_at = at + (start + half) * row_bytes + 4 * term
                    transposed(from_at, row_bytes, panel_at + term * panel_row_bytes + 4 * half, panel_row_bytes)
        for row in range(start, min(start + TILE_COLUMNS, num_out)):
            column = first + row
            for term in range(done, num_terms):
                out[column // TILE_COLUMNS, 1 + term, column % TILE_COLUMNS] = weight_OT[row, term]


@njit(nogil=True, error_model="numpy")
def head(x_RH, weight, num_tokens, out_RN, part, parts, matrix):
    """Logits: `product` of all rows with the packed weight of a linear head."""
    product(x_RH, x_RH, weight, (x_RH.shape[1], num_tokens), out_RN, len(x_RH), part, parts, matrix)


def panels(num_out: int) -> int:
    """Panels of a weight with so many outputs."""
    return -(-num_out // TILE_COLUMNS)
