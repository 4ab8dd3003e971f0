"""Names of modules and parameters, as Transformers gives them."""

from __future__ import annotations

import re
from collections.abc import Iterable


def wildcard(name: str) -> str:
    """A name as the keys of a tp_plan have it: `*` for the numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


READ_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear modules of one parent that are given the same tensor."""


def weights_side_by_side(names: Iterable[str]) -> list[str]:
    """Names of parameters in their order, but for the modules of `READ_TOGETHER`: the weights of those that one parent
    has come first, then their biases. In a flat buffer their weights are one weight then, and their biases one bias."""
    places: dict[tuple[str, int], int] = {}

    def order(numbered: tuple[int, str]) -> tuple[int, bool, int]:
        number, name = numbered
        owner, _, leaf = name.rpartition(".")
        parent, _, module = owner.rpartition(".")
        group = next((place for place, group in enumerate(READ_TOGETHER) if module in group), None)
        if group is None:
            return number, False, number
        return places.setdefault((parent, group), number), leaf == "bias", number

    return [name for _, name in sorted(enumerate(names), key=order)]
