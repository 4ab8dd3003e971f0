"""Adapters that are merged into the weights under them while these are read, as all weights are to be trained.

W + (alpha / rank) · B A          in float32 or wider, of W as it is stored, rounded once to the compute dtype
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from plait.layout.decoder import HEAD
from plait.layout.params import Block
from plait.models.expert_adapters import low_rank
from plait.models.files.adapter_folder import AdapterFolder
from plait.models.files.checkpoint_files import CheckpointFiles, stores_finer
from plait.models.files.hub import resolve
from plait.models.files.pretrained import reading
from plait.models.flat_weights import cut_block
from plait.models.lora import whole_decoder
from plait.models.lora_files import StoredAdapter, stored_adapter
from plait.models.lora_targets import targets_of
from plait.models.model import Model


@dataclass(frozen=True)
class Merging:
    """What an adapter in files makes of the weights of a model.

    transposed: layers, and parameters of experts, that keep their weights as [..., in, out]
    wide:       dtype of the sums
    """

    stored: StoredAdapter
    transposed: frozenset[str]
    wide: torch.dtype

    @classmethod
    def of(cls, model: Model, folder: Path) -> Merging:
        """
        Args:
            model: whole, perhaps without weights.

        Raises:
            ModelError: see `lora_files.load_adapter`.
        """
        stored = stored_adapter(model, folder)
        targets = targets_of(stored.settings, whole_decoder(model)).items()
        transposed = (f"{model.module.base_model_prefix}.{at}" for at, target in targets if target.is_transposed)
        return cls(stored, frozenset(transposed), torch.promote_types(model.dtype, torch.float32))

    def changes(self, name: str) -> bool:
        """Whether the adapter has a part for a parameter."""
        return name in self.stored.tensors or f"{name.removesuffix('.weight')}.lora_A.weight" in self.stored.tensors

    def block(self, block: Block, weight: Tensor) -> Tensor:
        """A block of a parameter with its part of the adapter; the weight itself where that has none.

        Args:
            weight: [*block.shape], in any dtype.

        Returns:
            [*block.shape], a sum in `wide`.
        """
        tensors, name = self.stored.tensors, block.param.name
        if (head := tensors.get(name)) is not None:
            return cut_block(head, block)
        at = name.removesuffix(".weight")
        if (a := tensors.get(f"{at}.lora_A.weight")) is None:
            return weight
        added = low_rank(a, tensors[f"{at}.lora_B.weight"], self.stored.settings.scaling, self.wide)
        part = cut_block(added.mT if at in self.transposed else added, block)
        return weight.to(self.wide) + part.to(weight.device)


@torch.no_grad()
def merge(model: Model, adapter: AdapterFolder) -> None:
    """Merge an adapter into a whole model's own weights, in place.

    Args:
        model: as it was read from the adapter's base.

    Raises:
        ModelError: see `lora_files.load_adapter`; nothing is changed. Or the base cannot be read.
    """
    merging = Merging.of(model, adapter.folder)
    folder, files = resolve(adapter.base), None
    if stores_finer(folder, model.dtype):
        with reading(adapter.base):
            files = CheckpointFiles.of(folder, model.module, model.parameters)
    for block, start, stop in model.layout.entries:
        if merging.changes(name := block.param.name):
            weight = model.weights[start:stop].view(block.shape)
            weight.copy_(merging.block(block, weight if files is None or name == HEAD else files.block(block)))
