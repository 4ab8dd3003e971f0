"""Products of a layer that read the same input, computed as one where their weights lie one behind another in memory.

Queries, keys and values are three products of a decoder layer, gate and up projection two. A step of few rows takes as
long as its weights take to be read, and a small product leaves most of a GPU idle. Weights are views of one flat buffer
(`models.flat_weights`), in which they lie side by side and their biases behind them
(`models.module_names.weights_side_by_side`). So the joined weight and bias are views as well: nothing is copied, and
what updates the weights updates them.

Shapes: T new tokens, I input and O output features of all of a product's parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.models.module_names import READ_TOGETHER
from plait.models.parallel.layer_hooks import Enter


class JoinedProducts:
    """The products of some layers that can be joined.

    Args:
        layers: decoder layers.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._sites = [site for layer in layers for parent in layer.modules() for site in _sites(parent)]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the layers compute them joined, where their weights lie one behind another now."""
        joined = [site for site in self._sites if site.joins()]
        try:
            for site in joined:
                site.swap(site.parts)
            yield
        finally:
            for site in joined:
                site.swap(site.own)


class _Product:
    """One product that several modules ask for, each for its part: computed when the first asks, forgotten when the
    last has asked. So it holds nothing before a layer and behind it."""

    def __init__(self, count: int) -> None:
        self.weight_OI: nn.Parameter | None = None
        self.bias_O: nn.Parameter | None = None
        self._count = self._left = count
        self._given: Tensor | None = None
        self._out: Tensor | None = None

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Columns start … stop − 1 of x [..., T, I] · weightᵀ + bias."""
        if self._out is None:
            self._given, self._out = x, F.linear(x, self.weight_OI, self.bias_O)  # type: ignore[arg-type]
        assert x is self._given, "its parts are given one tensor"
        out = self._out[..., start:stop]
        self._left -= 1
        if self._left == 0:
            self._left, self._given, self._out = self._count, None, None
        return out


class _Part(nn.Module):
    """In place of a linear layer: its part of a product."""

    def __init__(self, product: _Product, start: int, stop: int) -> None:
        super().__init__()
        self.product, self.start, self.stop = product, start, stop

    def forward(self, x: Tensor) -> Tensor:
        """[..., T, I] to [..., T, stop − start]."""
        return self.product.part(x, self.start, self.stop)


class _Site:
    """Modules of one parent that may be parts of one product."""

    def __init__(self, parent: nn.Module, names: Sequence[str]) -> None:
        self._parent, self._names = parent, names
        self.own = [getattr(parent, name) for name in names]
        self._product, self.parts, start = _Product(len(names)), [], 0
        self._at: list[tuple[int, torch.dtype]] = []
        """Where weights and biases lay when they were asked last."""
        for linear in self.own:
            self.parts.append(_Part(self._product, start, start + linear.out_features))
            start += linear.out_features

    def joins(self) -> bool:
        """Whether the modules are still there, and their weights lie one behind another; then the product reads them
        where they lie now."""
        if any(getattr(self._parent, name) is not own for name, own in zip(self._names, self.own, strict=True)):
            return False
        weights = [linear.weight for linear in self.own]
        biases = [linear.bias for linear in self.own if linear.bias is not None]
        at = [(tensor.data_ptr(), tensor.dtype) for tensor in (*weights, *biases)]
        if at != self._at:  # of each step it is asked, and to make a parameter takes as long as a launch
            self._at = at
            self._product.weight_OI, self._product.bias_O = _joined(weights), _joined(biases) if biases else None
        return self._product.weight_OI is not None and (not biases or self._product.bias_O is not None)

    def swap(self, modules: Sequence[nn.Module]) -> None:
        """Put modules in the places of these."""
        for name, module in zip(self._names, modules, strict=True):
            self._parent._modules[name] = module


def _joined(parts: Sequence[nn.Parameter]) -> nn.Parameter | None:
    """Weights [O, I] or biases [O] as one, where they lie one behind another in one storage. It is a parameter, as the
    compiler takes the shapes of those as they are."""
    first, place = parts[0].detach(), parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != place or not part.is_contiguous() or part.dtype != first.dtype:
            return None
        place += part.nbytes
    if first.storage_offset() + sum(part.numel() for part in parts) > _elements(first):
        return None  # of several storages, which happen to lie side by side
    joined = first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
    return nn.Parameter(joined, requires_grad=False)


def _sites(parent: nn.Module) -> Iterator[_Site]:
    for names in READ_TOGETHER:
        found = [getattr(parent, name, None) for name in names]
        linears = [one for one in found if type(one) is nn.Linear and _stands_alone(one)]
        if len(linears) == len(names) and len({linear.bias is None for linear in linears}) == 1:
            yield _Site(parent, names)


def _stands_alone(linear: nn.Linear) -> bool:
    """Whether nothing happens with what the module returns, and with what it is given at most what training needs."""
    return not linear._forward_hooks and all(isinstance(hook, Enter) for hook in linear._forward_pre_hooks.values())


def _elements(tensor: Tensor) -> int:
    """That the storage of a tensor has."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()
