"""Names of modules and parameters, as Transformers gives them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain, groupby


def wildcard(name: str) -> str:
    """A name as the keys of a tp_plan have it: `*` for the numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


READ_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear modules of one parent that are given the same tensor."""


def weights_side_by_side(names: Iterable[str]) -> list[str]:
    """Names of parameters in the order of their modules, but for neighbours of one parent in `READ_TOGETHER`: their
    weights come first, then their biases. In a flat buffer their weights are one weight then, and their biases one
    bias."""
    ordered: list[str] = []
    for read_together, group in groupby(names, _read_together):
        neighbours = list(group)
        ordered += neighbours if read_together is None else sorted(neighbours, key=_is_bias)
    return ordered


def in_module_order(ordered: Iterable[str]) -> list[str]:
    """Names of parameters as their modules have them, from `weights_side_by_side`: each bias behind its weight. Flat
    buffers were in this order before."""
    names: list[str] = []
    for read_together, neighbours in groupby(ordered, _read_together):
        of_modules: dict[str, list[str]] = {}
        for name in neighbours:
            of_modules.setdefault(name if read_together is None else name.rpartition(".")[0], []).append(name)
        names += chain.from_iterable(of_modules.values())
    return names


def _is_bias(name: str) -> bool:
    return name.endswith(".bias")


def _read_together(name: str) -> tuple[str, int] | None:
    """The parent of the module that a parameter belongs to, and the module's place in `READ_TOGETHER`, if it has
    one."""
    parent, _, module = name.rpartition(".")[0].rpartition(".")
    return next(((parent, place) for place, group in enumerate(READ_TOGETHER) if module in group), None)
