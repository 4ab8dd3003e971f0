"""Adapters that are merged into the weights under them while these are read, as all weights are to be trained.

W + (alpha / rank) · B A          in float32 or wider, rounded once to the compute dtype
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from plait.layout.params import Block
from plait.models.files.saving import low_rank
from plait.models.flat_weights import cut_block
from plait.models.lora_files import StoredAdapter, stored_adapter
from plait.models.model import Model


@dataclass(frozen=True)
class Merging:
    """What an adapter in files makes of the weights of a model.

    transposed: layers that keep their weights as [in, out]
    """

    stored: StoredAdapter
    transposed: frozenset[str]

    @classmethod
    def of(cls, model: Model, folder: Path) -> Merging:
        """
        Args:
            model: whole, perhaps without weights.

        Raises:
            ModelError: see `lora_files.load_adapter`.
        """
        stored = stored_adapter(model, folder)
        layers = {name.removesuffix(".lora_A.weight") for name in stored.tensors if ".lora_A." in name}
        kinds = {at: type(model.module.get_submodule(at)).__name__ for at in layers}
        return cls(stored, frozenset(at for at, kind in kinds.items() if kind == "Conv1D"))

    def block(self, block: Block, weight: Tensor) -> Tensor:
        """A block of a parameter with its part of the adapter; the weight itself where that has none.

        Args:
            weight: [*block.shape], as the model computes with it.
        """
        tensors, name = self.stored.tensors, block.param.name
        if (head := tensors.get(name)) is not None:
            return cut_block(head, block)
        at = name.removesuffix(".weight")
        if (a := tensors.get(f"{at}.lora_A.weight")) is None:
            return weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        added = low_rank(a, tensors[f"{at}.lora_B.weight"], self.stored.settings.scaling, wide)
        part = cut_block(added.t() if at in self.transposed else added, block)
        return weight.to(wide) + part.to(weight.device)


@torch.no_grad()
def merge(model: Model, folder: Path) -> None:
    """Merge an adapter into a whole model's own weights, in place.

    Raises:
        ModelError: see `lora_files.load_adapter`; nothing is changed.
    """
    merging = Merging.of(model, folder)
    for block, start, stop in model.layout.entries:
        weight = model.weights[start:stop].view(block.shape)
        weight.copy_(merging.block(block, weight))
