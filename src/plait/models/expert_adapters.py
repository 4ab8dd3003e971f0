"""Low-rank adapters on the experts of a mixture, which are stacked in parameters and no linear layers.

    W_e + (alpha / rank) · B_e A_e          A [E, rank, in] drawn, B [E, out, rank] zero at first, of each expert e

It is what peft makes of `target_parameters`. There the sum is written out, for all experts, in each forward, and its
gradient as well. Here the family's own code computes with an object in the place of W (`LowRankSum`), which answers the
products that it is asked for by the sum of two: where experts are computed together, A and B are products of groups as
W is, of rank r; where one after another, so are these. A product of another kind is refused, so nothing is left out.

Shapes: E experts of this rank, O outputs, I inputs, R rank, P pairs of a token and an expert.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.errors import ModelError
from plait.layout.adapters import GROUPED_BYTES


@dataclass(frozen=True, eq=False)
class Pair:
    """A [E, R, I] and B [E, O, R] of one parameter of experts, of this rank."""

    a: nn.Parameter
    b: nn.Parameter
    scaling: float


class AdaptedExperts:
    """`forward` of a module of experts, some of whose parameters have adapters.

    A copy of the module has none: they are another's.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.pairs: dict[str, Mapping[str, Pair]] = {}
        """Adapter → parameter's name in the module → what it is adapted by."""
        self._inner: Callable[..., Tensor] = layer.forward
        self.active: list[str] = []
        """The adapter that is on, if any (`Backbone.activate`)."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Tensor]:
        return copy.deepcopy(self._inner, memo)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._in_place():
            return self._inner(*args, **kwargs)

    @torch.no_grad()
    def merged(self, name: str, adapter: str) -> Tensor:
        """A parameter of the module, [E, O, I] or transposed as it lies, with this adapter's part: where it has one,
        float32 or wider, so that it is rounded only once."""
        weight: Tensor = self.layer._parameters[name]
        if (pair := self.pairs.get(adapter, {}).get(name)) is None:
            return weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        added = low_rank(pair.a, pair.b, pair.scaling, wide)
        return weight.to(wide) + (added.mT if self.layer.is_transposed else added)

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        """Within it the module's code finds sums where it looks for its parameters."""
        layer, attributes = self.layer, vars(self.layer)
        sums = {
            name: LowRankSum(layer._parameters[name], pair.a, pair.b, pair.scaling, by_columns=layer.is_transposed)
            for adapter in self.active
            for name, pair in self.pairs[adapter].items()
        }
        attributes.update(sums)  # found before what torch has among its parameters
        try:
            yield
        finally:
            for name in sums:
                del attributes[name]


def adapt(layer: Any, adapter: str, pairs: Mapping[str, Pair]) -> AdaptedExperts:
    """Give a module of experts an adapter, beside those that it may have; none is on.

    Args:
        layer: of Transformers' interface (`stacked_parameters`); perhaps a rank's part.
        pairs: by the names of its parameters.
    """
    if not isinstance(adapted := vars(layer).get("forward"), AdaptedExperts):
        adapted = layer.forward = AdaptedExperts(layer)
    assert adapter not in adapted.pairs, f"the experts have an adapter {adapter!r} already"
    adapted.pairs[adapter] = pairs
    return adapted


def adapted_experts(module: nn.Module) -> dict[str, AdaptedExperts]:
    """The modules of experts that carry adapters, by name."""
    forwards = ((name, vars(layer).get("forward")) for name, layer in module.named_modules())
    return {name: forward for name, forward in forwards if isinstance(forward, AdaptedExperts)}


def stacked_parameters(module: nn.Module) -> dict[str, Any]:
    """Parameters [E, …] of experts that can have adapters, by name, with the module of each: of families whose experts
    say how they lie (Transformers' `use_experts_implementation`)."""
    return {
        f"{at}.{name}": layer
        for at, layer in module.named_modules()
        if isinstance(getattr(layer, "is_transposed", None), bool)
        for name, param in layer.named_parameters(recurse=False)
        if param.ndim == 3
    }


def low_rank(a: Tensor, b: Tensor, scaling: float, wide: torch.dtype) -> Tensor:
    """What an adapter adds to a weight, scaling · B A [..., O, I], of A [..., R, I] and B [..., O, R]."""
    return b.to(wide) @ a.to(wide) * scaling


# --- products ----------------------------------------------------------------------------------------------------


class LowRankSum:
    """W + scaling · B A of some experts, or of one, never written out.

    Args:
        weight: [E, O, I], or [E, I, O] if `by_columns`; of one expert without E.
    """

    def __init__(self, weight: Tensor, a: Tensor, b: Tensor, scaling: float, *, by_columns: bool) -> None:
        self.weight, self.a, self.b, self.scaling, self.by_columns = weight, a, b, scaling, by_columns

    shape = property(lambda self: self.weight.shape)
    ndim = property(lambda self: self.weight.ndim)
    dtype = property(lambda self: self.weight.dtype)
    device = property(lambda self: self.weight.device)

    def data_ptr(self) -> int:
        return self.weight.data_ptr()

    def __getitem__(self, which: Any) -> LowRankSum:
        """One expert, or a row of experts, by one index."""
        assert not isinstance(which, tuple), "a part of an expert"
        return LowRankSum(self.weight[which], self.a[which], self.b[which], self.scaling, by_columns=self.by_columns)

    def transpose(self, first: int, second: int) -> LowRankSum:
        assert {first % self.ndim, second % self.ndim} == {self.ndim - 2, self.ndim - 1}, "experts stay in their place"
        weight = self.weight.transpose(first, second)
        return LowRankSum(weight, self.a, self.b, self.scaling, by_columns=not self.by_columns)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Tensor:
        product = _PRODUCTS.get(func)
        if product is None:
            name = getattr(func, "__name__", str(func))
            raise ModelError(
                f"lora.target_modules: experts of this family compute with their weights by `{name}`, beside which no "
                "adapter computes; leave out the names of experts"
            )
        return product(*args, **(kwargs or {}))

    def added(self, whole: Tensor, low: Tensor) -> Tensor:
        """Both products of one input, [..., O], together."""
        return torch.add(whole, low, alpha=self.scaling)


def _linear(x: Tensor, experts: LowRankSum, bias: Tensor | None = None) -> Tensor:
    assert not experts.by_columns, "a linear layer has its outputs in rows"
    low = F.linear(F.linear(x, experts.a), experts.b)
    return experts.added(F.linear(x, experts.weight, bias), low)


def _matmul(left: Tensor | LowRankSum, right: LowRankSum | Tensor) -> Tensor:
    """The product [..., O] of rows from the left, or of columns from the right."""
    if isinstance(right, LowRankSum):
        assert right.by_columns, "rows go in"
        return right.added(left @ right.weight, left @ right.a.mT @ right.b.mT)
    assert isinstance(left, LowRankSum), "one of the two are experts"
    assert not left.by_columns, "columns go in"
    return left.added(left.weight @ right, left.b @ (left.a @ right))


def _grouped(x_PI: Tensor, experts: LowRankSum, *, offs: Tensor, **rest: None) -> Tensor:
    """[P, O] of rows that lie by experts, up to `offs` [E]."""
    assert experts.by_columns, "rows go in"
    assert not any(value is not None for value in rest.values()), "products of groups alone"
    a_ERI, b_EOR = experts.a, experts.b
    if beyond := -a_ERI.shape[1] % (GROUPED_BYTES // x_PI.element_size()):  # a rank that no grouped product takes
        a_ERI, b_EOR = F.pad(a_ERI, (0, 0, 0, beyond)), F.pad(b_EOR, (0, beyond))
    low_PR = F.grouped_mm(x_PI, a_ERI.mT, offs=offs)
    return experts.added(F.grouped_mm(x_PI, experts.weight, offs=offs), F.grouped_mm(low_PR, b_EOR.mT, offs=offs))


_PRODUCTS: Mapping[Any, Callable[..., Tensor]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.bmm: _matmul,
    torch._grouped_mm: _grouped,
}
"""What experts of Transformers compute with."""
