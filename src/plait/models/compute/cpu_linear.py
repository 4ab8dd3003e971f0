"""Linear layers on a CPU by oneDNN, which torch itself asks for bfloat16 alone: in float32 it takes MKL's products.

On a CPU with AVX-512 that is not Intel's, MKL's float32 product runs at half of what the machine can do. oneDNN's is
float32 as well (its errors are of the same size) and is reached through operators that torch keeps for its compiler.
Where they are missing, and wherever they do not pay, `F.linear` computes.

Measured on one core of an AMD EPYC (AVX-512, bfloat16), in GFLOP/s, [4096, 256] by [688, 256]ᵀ in float32:

    forward: F.linear 99, oneDNN 220      input gradient: 97, 218      weight gradient: 101, 189 (rows by 1,024)

The weights of a generation's decode steps are read by few rows at a time. For those `PackedLinears` holds them once
more, in the order in which oneDNN reads them: [32, 576] by [1536, 576]ᵀ takes 196 µs in place of 257 (bfloat16), 351
in place of 794 (float32). Packed and unpacked products are equal bit for bit, those of one float32 row up to rounding.

On CPUs without AVX-512 products of bfloat16 are `widened`.

Shapes: N rows, I input and O output features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait import kept_memory
from plait.models.compute import widened

LEAST_PRODUCTS = 1 << 19
"""N · I · O below which a float32 product is left to F.linear: 8 rows of [256, 128] take 18 µs there, 24 µs here."""

GRADIENT_ROWS = 1024
"""Rows of one product of the weight gradient: both operands stay in the cache (164 GFLOP/s at 4,096 rows at once)."""

PACK_ROWS = 32
"""Rows that a packed weight is laid out for; other numbers of rows take it as well, as fast or within 5 %."""


def _available() -> bool:
    try:
        weight_OI = torch.zeros(2, 2)
        _product(weight_OI, torch.ops.mkldnn._reorder_linear_weight(weight_OI, 1), None)
        _weight_gradient(weight_OI, weight_OI)
    except (AttributeError, RuntimeError):
        return False
    return True


def _product(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x · weightᵀ + bias, of one dtype; the weight may be packed, or a transposed view."""
    return torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")


def _weight_gradient(grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    """gradᵀ · x [O, I], float32."""
    shape_OI = grad_NO.new_empty(()).expand(grad_NO.shape[1], x_NI.shape[1])
    return torch.ops.aten.mkldnn_linear_backward_weights(grad_NO.to_mkldnn(), x_NI.to_mkldnn(), shape_OI, False)[
        0
    ].to_dense()


kept_memory.bound()  # `_available` computes, perhaps for the first time in this process
AVAILABLE = _available()
"""Whether this torch has the operators."""


def pays(num_rows: int, weight_OI: Tensor) -> bool:
    """Whether a product of so many rows is faster here than by torch; False for every device but the CPU."""
    if widened.takes(weight_OI):
        return True
    return (
        weight_OI.dtype == torch.float32
        and weight_OI.device.type == "cpu"
        and AVAILABLE
        and num_rows * weight_OI.numel() >= LEAST_PRODUCTS
    )


@contextlib.contextmanager
def everywhere() -> Iterator[None]:
    """Within it float32 products of any size are oneDNN's: what happens to many rows can be seen on a few."""
    global LEAST_PRODUCTS
    before, LEAST_PRODUCTS = LEAST_PRODUCTS, 0
    try:
        yield
    finally:
        LEAST_PRODUCTS = before


def unviewed(out: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor that nobody else has, of any dtype, in another shape of as many elements, not as a view. A family may
    change in place what an autograd Function gives back, which torch refuses for views."""
    return torch.ops.aten._unsafe_view(out, shape)  # type: ignore[no-any-return]


def _any_product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x · weightᵀ + bias [..., O] of a dtype that this CPU computes or widens."""
    return (widened.product if widened.takes(x) else _product)(x, weight_OI, bias_O)


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """F.linear, once differentiable where it is not torch that computes it.

    Args:
        x: [..., I], any dtype and device; on a CPU float32, and bfloat16 if it is widened, may take another way than
            F.linear.
        weight_OI, bias_O: of the same dtype.

    Returns:
        [..., O], which may be changed in place, as that of F.linear.
    """
    if weight_OI.dtype != x.dtype or not pays(x.numel() // x.shape[-1], weight_OI):
        return F.linear(x, weight_OI, bias_O)
    if not torch.is_grad_enabled():
        return _any_product(x, weight_OI, bias_O)
    return _Linear.apply(x, weight_OI, bias_O)  # type: ignore[no-any-return]


def input_gradient(grad_NO: Tensor, weight_OI: Tensor) -> Tensor:
    """grad · weight [N, I] of a product without bias."""
    if not pays(len(grad_NO), weight_OI):
        return grad_NO @ weight_OI
    if widened.takes(weight_OI):
        return widened.input_gradient(grad_NO, weight_OI)
    return _product(grad_NO, weight_OI.t(), None)


def weight_gradient(grad_NO: Tensor, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """gradᵀ · x [O, I], in the dtype of its operands."""
    if not pays(len(grad_NO), weight_OI):
        return grad_NO.t() @ x_NI
    if widened.takes(weight_OI):
        return widened.weight_gradient(grad_NO, x_NI, weight_OI)
    pieces = zip(grad_NO.split(GRADIENT_ROWS), x_NI.split(GRADIENT_ROWS), strict=True)
    total_OI = _weight_gradient(*next(pieces))
    for grad_CO, x_CI in pieces:
        total_OI.add_(_weight_gradient(grad_CO, x_CI))
    return total_OI


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight_OI)  # a frozen weight keeps no input
        ctx.shape = x.shape
        return unviewed(_any_product(x.reshape(-1, x.shape[-1]), weight_OI, bias_O), (*x.shape[:-1], len(weight_OI)))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_NO = grad.reshape(-1, grad.shape[-1]).contiguous()
        grad_x = input_gradient(grad_NO, weight_OI).view(ctx.shape) if needs_x else None
        grad_OI = None
        if needs_weight:
            grad_OI = weight_gradient(grad_NO, x.reshape(-1, x.shape[-1]), weight_OI)
        return grad_x, grad_OI, grad_NO.sum(0) if needs_bias else None


class _Forward:
    """`forward` of one nn.Linear, set on the instance: adapters wrap the layer, copies of the module copy it."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.packed_OI: Tensor | None = None
        """Within `PackedLinears.applied`."""

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed_OI is not None and not torch.is_grad_enabled():
            return _any_product(x, self.packed_OI, self.layer.bias)
        return linear(x, self.layer.weight, self.layer.bias)


def install(module: nn.Module) -> None:
    """Let every nn.Linear of the module compute by `linear`. Classes stay as they are; may be called again."""
    for layer in module.modules():
        if type(layer) is nn.Linear and "forward" not in vars(layer):
            layer.forward = _Forward(layer)


class PackedLinears:
    """The weights of a module's linear layers once more, as oneDNN reads them, for forwards without gradients.

    They are another copy: `drop` them before the weights change.

    Args:
        module: `install` was called on it. Its parameters stay where they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._weights: list[tuple[_Forward, Tensor]] | None = None

    @property
    def is_packed(self) -> bool:
        """Whether `pack` was called, though there may have been nothing to do."""
        return self._weights is not None

    def pack(self) -> None:
        """Copy the weights as they are now. On another device, in float64 or without oneDNN there is nothing to do."""
        self._weights = []
        packed: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        for forward in map(_forward_of, self._module.modules()):
            if forward is None or not AVAILABLE:
                continue
            weight_OI = forward.layer.weight.detach()
            if weight_OI.device.type != "cpu" or weight_OI.dtype not in (torch.float32, torch.bfloat16):
                continue
            key = (weight_OI.data_ptr(), tuple(weight_OI.shape))
            if key not in packed:
                packed[key] = torch.ops.mkldnn._reorder_linear_weight(
                    weight_OI.float() if widened.takes(weight_OI) else weight_OI, PACK_ROWS
                )
            self._weights.append((forward, packed[key]))

    def drop(self) -> None:
        """Give the copies back; nothing to do where there are none."""
        self._weights = None

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the module computes with the packed weights, where there are any."""
        weights = self._weights or ()
        for forward, packed_OI in weights:
            forward.packed_OI = packed_OI
        try:
            yield
        finally:
            for forward, _ in weights:
                forward.packed_OI = None


def _forward_of(layer: nn.Module) -> _Forward | None:
    forward: Callable[..., Any] | None = vars(layer).get("forward")
    return forward if isinstance(forward, _Forward) else None
