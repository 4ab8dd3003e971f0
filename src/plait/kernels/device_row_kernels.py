"""The Triton programs behind `device_rows`. Imports triton; TRITON_INTERPRET=1 runs them on a CPU, for tests.

Numbers are float32 in registers, and rounded where the operations round whose place they take.

Shapes: T rows, H hidden size, P parts of the rows, N elements.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalise(x, weight, out, inverse, eps, H: tl.constexpr, WIDE: tl.constexpr):
    """Grid (T,): weight · (x / √(mean(x²) + eps)), the quotient rounded before it meets the weight, and the inverse of
    that root. WIDE: a power of two, H at least."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDE)
    is_in = at < H
    x_H = tl.load(x + row * H + at, mask=is_in, other=0.0).to(tl.float32)
    root = 1.0 / tl.sqrt(tl.sum(x_H * x_H, 0) / H + eps)
    normal_H = (x_H * root).to(out.dtype.element_ty).to(tl.float32)
    weight_H = tl.load(weight + at, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + row * H + at, (normal_H * weight_H).to(out.dtype.element_ty), mask=is_in)
    tl.store(inverse + row, root)


@triton.jit
def normalise_backward(
    x, weight, inverse, grad, grad_x, parts, num_rows, H: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr
):
    """Grid (P,): the gradient of x, and parts [P, H] of that of the weight, of ROWS rows each."""
    part = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDE)
    is_in = at < H
    weight_H = tl.load(weight + at, mask=is_in, other=0.0).to(tl.float32)
    sum_H = tl.zeros((WIDE,), tl.float32)
    for number in range(ROWS):
        row = part * ROWS + number
        there = is_in & (row < num_rows)
        root = tl.load(inverse + row, mask=row < num_rows, other=0.0)
        normal_H = tl.load(x + row * H + at, mask=there, other=0.0).to(tl.float32) * root
        grad_H = tl.load(grad + row * H + at, mask=there, other=0.0).to(tl.float32)
        sum_H += grad_H * normal_H
        grad_H *= weight_H
        mean = tl.sum(grad_H * normal_H, 0) / H
        found_H = (grad_H - normal_H * mean) * root
        tl.store(grad_x + row * H + at, found_H.to(grad_x.dtype.element_ty), mask=there)
    tl.store(parts + part * H + at, sum_H, mask=is_in)


@triton.jit
def gate_up(gate, up, out, count, N: tl.constexpr):
    """Grid (⌈count / N⌉,): silu(gate) · up, the first factor rounded."""
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    is_in = at < count
    x_N = tl.load(gate + at, mask=is_in, other=0.0).to(tl.float32)
    silu_N = (x_N / (1.0 + tl.exp(-x_N))).to(out.dtype.element_ty).to(tl.float32)
    up_N = tl.load(up + at, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + at, (silu_N * up_N).to(out.dtype.element_ty), mask=is_in)


@triton.jit
def gate_up_backward(gate, up, grad, grad_gate, grad_up, count, N: tl.constexpr):
    """Grid (⌈count / N⌉,): the gradients of both."""
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    is_in = at < count
    x_N = tl.load(gate + at, mask=is_in, other=0.0).to(tl.float32)
    up_N = tl.load(up + at, mask=is_in, other=0.0).to(tl.float32)
    grad_N = tl.load(grad + at, mask=is_in, other=0.0).to(tl.float32)
    share_N = 1.0 / (1.0 + tl.exp(-x_N))
    silu_N = (x_N * share_N).to(grad_up.dtype.element_ty).to(tl.float32)
    found_N = grad_N * up_N * share_N * (1.0 + x_N * (1.0 - share_N))
    tl.store(grad_up + at, (grad_N * silu_N).to(grad_up.dtype.element_ty), mask=is_in)
    tl.store(grad_gate + at, found_N.to(grad_gate.dtype.element_ty), mask=is_in)
