"""What tensor parallelism has modules do with what they are given and what they return (`tensor_parallel` says which).

Shapes: T tokens, H hidden size.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plait.models.compute import cpu_linear
from plait.models.parallel.collectives import Ranges, copied, gathered
from plait.models.parallel.collectives import split as split_columns
from plait.models.parallel.mixers import output_of
from plait.models.parallel.peers import Peers
from plait.models.parallel.token_split import TokenSplit


class Copies:
    """f, once for layers that read the same tensor (queries, keys and values; gate and up)."""

    def __init__(self, split: TokenSplit) -> None:
        self.tp, self._split = split.tp, split
        self._last: tuple[Tensor, bool, Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Copies:
        memo[id(self)] = twin = Copies(copy.deepcopy(self._split, memo))
        return twin

    def __call__(self, x: Tensor, counts: bool = True, shared: bool = False) -> Tensor:
        if self._split.is_on or not (x.requires_grad and torch.is_grad_enabled()):
            return x  # where tokens came together, their gradients will be summed
        # By `shared`, not by `counts`: every rank must come to the same number of nodes.
        if self._last is None or self._last[0] is not x or self._last[1] != shared:
            self._last = (x, shared, copied(x, self.tp, counts=counts))
        return self._last[2]

    def clear(self, *_: Any) -> None:
        self._last = None


@dataclass(eq=False)
class Enter:
    """f on a layer's input; `counts`, `shared`: see `Copies`, of columns that ranks share."""

    copies: Copies
    counts: bool = True
    shared: bool = False

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.copies(args[0], self.counts, self.shared), *args[1:]


@dataclass(eq=False)
class EnterExperts:
    """Routing weights weigh what this rank has of the experts alone, so their gradients are parts too."""

    copies: Copies

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(self._entered, args)), {key: self._entered(value) for key, value in kwargs.items()}

    def _entered(self, value: Any) -> Any:
        return self.copies(value) if isinstance(value, Tensor) and value.is_floating_point() else value


@dataclass(eq=False)
class EnterMixer:
    """f on the hidden states [1, T, H]."""

    copies: Copies

    def __call__(self, mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self.copies(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self.copies(kwargs["hidden_states"])}


@dataclass(eq=False)
class LeaveMixer:
    """g: the sum of what ranks return, [1, T, H]; the bias comes once."""

    split: TokenSplit

    def __call__(self, mixer: nn.Module, args: Any, out: Tensor) -> Tensor:
        total, bias = self.split.summed(out), output_of(mixer).bias
        return total if bias is None else total + bias


@dataclass(eq=False)
class EnterRotary:
    """f on the last columns of what a layer returns: rotary keys, which go to every head."""

    copies: Copies
    columns: int

    def __call__(self, layer: nn.Module, args: Any, out: Tensor) -> Tensor:
        latent, rotary = out.split([out.shape[-1] - self.columns, self.columns], -1)
        return torch.cat([latent, self.copies(rotary)], -1)


@dataclass(eq=False)
class Gather:
    """What ranks return, column by column, becomes whole."""

    tp: Peers
    ranges: Ranges

    def __call__(self, layer: nn.Module, args: Any, out: Tensor) -> Tensor:
        return gathered(out, self.tp, self.ranges)


@dataclass(eq=False)
class Split:
    """A whole input becomes this rank's columns of it."""

    tp: Peers
    ranges: Ranges

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return split_columns(args[0], self.tp, self.ranges), *args[1:]


@dataclass(eq=False)
class Reduce:
    """g: the sum of what ranks return; the bias comes once."""

    split: TokenSplit
    adds_bias: bool = False

    def __call__(self, layer: Any, args: Any, out: Tensor) -> Tensor:
        total = self.split.summed(out)
        return total + layer.bias if self.adds_bias else total


@dataclass(eq=False)
class WithoutBias:
    """`forward` of a linear layer whose bias is added to the sum."""

    layer: nn.Linear

    def __call__(self, x: Tensor) -> Tensor:
        return cpu_linear.linear(x, self.layer.weight, None)


@dataclass(eq=False)
class EmbeddingRows:
    """A rank's rows of an embedding: those of others are zero before the sum."""

    start: int
    stop: int
    split: TokenSplit
    _has: list[Tensor] = field(default_factory=list)

    def enter(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids = args[0]
        self._has.append((ids >= self.start) & (ids < self.stop))
        return (ids - self.start).clamp(0, self.stop - self.start - 1), *args[1:]

    def leave(self, layer: nn.Module, args: Any, out: Tensor) -> Tensor:
        """[..., H], rows of other ranks at any value, to the sum over the ranks, in the same shape."""
        return self.split.summed(out * self._has.pop()[..., None])
