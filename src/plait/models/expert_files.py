"""Adapters of experts as peft lays them out in files: two dims for all experts together.

Peft wraps a module of experts once for each of its parameters that has an adapter, in the module's order, so the last
one has the module's own name, and each before it one `base_layer` more.

    lora_A [E · rank, in]    rows of one expert behind those of another
    lora_B [out, rank · E]   the columns of all experts for the first of rank, then for the second, and so on
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def names_in_peft(experts: Iterable[str]) -> dict[str, str]:
    """Name of a parameter of experts → what its adapter goes by in a file.

    Args:
        experts: the parameters that have adapters, in the order in which each module has them.
    """
    of_module: dict[str, list[str]] = {}
    for name in experts:
        of_module.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        name: f"{module}{'.base_layer' * outside}"
        for module, names in of_module.items()
        for outside, name in enumerate(reversed(names))
    }


def shape_in_peft(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in a file of A [E, rank, in] or B [E, out, rank]; of any other tensor its own.

    Args:
        name: ends in `.lora_A.weight` or `.lora_B.weight`.
    """
    if len(shape) != 3:
        return shape
    experts, first, second = shape
    return (experts * first, second) if ".lora_A." in name else (first, experts * second)


def to_peft(name: str, tensor: Tensor) -> Tensor:
    """A tensor as a file has it: [E · rank, in] of A [E, rank, in], [out, rank · E] of B [E, out, rank], or itself."""
    if tensor.ndim != 3:
        return tensor
    if ".lora_A." in name:
        return tensor.flatten(0, 1)
    return tensor.permute(1, 2, 0).flatten(1, 2).contiguous()


def from_peft(name: str, tensor: Tensor, num_experts: int) -> Tensor:
    """A [E, rank, in] or B [E, out, rank] of a tensor of a file."""
    if ".lora_A." in name:
        return tensor.unflatten(0, (num_experts, -1))
    return tensor.unflatten(1, (-1, num_experts)).permute(2, 0, 1).contiguous()
