"""Parts of a model that no device has whole: each rank reads its blocks of a checkpoint's tensors into its part.

The family's module is made without weights, cut, and given the rank's blocks one after another from the mapped files:
a rank never has more than its part and a tensor's slice, or, where Transformers converts what is stored, the tensors
that are converted together (the experts of a layer). That the family can be cut is shown on a model of the same
configuration with few layers and random weights (`parallel.scaled_down`).

A quantised checkpoint is read whole into host memory and cut there; the device gets the part alone. An adapter that a
model begins as is merged into each block as it is read. A family that cannot be scaled down is proven on the whole
model, on the device.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.kept_memory import give_back_freed
from plait.layout.decoder import HEAD
from plait.layout.params import Block, Parameters
from plait.layout.shards import check
from plait.models import scalar_loading
from plait.models.files.adapter_folder import AdapterFolder, adapter_of
from plait.models.files.checkpoint_files import CheckpointFiles, stores_finer
from plait.models.files.hub import resolve
from plait.models.files.pretrained import generation_of, new_module, reading
from plait.models.flat_weights import FlatWeights, cut_block
from plait.models.language_loading import load_model, read_config, read_folder, without_weights
from plait.models.loading import over_base, without
from plait.models.parallel.partial import Values, cut_from, cut_layers, part_of, take_weights
from plait.models.parallel.scaled_down import Proven, kinds_of, parameters_on_meta, scaled_down
from plait.models.parallel.team import Team
from plait.models.scalar_loading import ScalarHead, load_scalar
from plait.models.scalar_model import ScalarModule
from plait.models.working_weights import dtype_of


class PartLoader:
    """Reads parts of checkpoints. All ranks of a team ask it for the same parts in the same order.

    Args:
        dtype: compute dtype, a key of `working_weights.DTYPES`.
        device: of the parts.
        seed, head_std: of a fresh scalar head, see `scalar_loading.scalar_of`.
    """

    def __init__(self, *, dtype: str, device: torch.device | str, seed: int, head_std: float | None) -> None:
        self._dtype, self._device = dtype_of(dtype), device
        self._loaded: dict[str, Any] = {"dtype": dtype, "device": device}
        self._drawn: dict[str, Any] = {"seed": seed, "head_std": head_std}
        self._read: dict[str, tuple[Path, Any, Any]] = {}
        self._proven: dict[tuple[str, bool, Any], Proven] = {}
        self._wholes: dict[tuple[str, bool], nn.Module] = {}

    def parameters(self, name: str, *, scalar: bool = False) -> Parameters:
        """Parameters of a whole model, as its parts have them; arguments as of `part`.

        Raises:
            ModelError: the checkpoint cannot be found or read, or the family is refused.
        """
        return self.without_weights(name, scalar=scalar).parameters

    def part(
        self,
        name: str,
        team: Team,
        *,
        scalar: bool = False,
        memory: FlatWeights | None = None,
        merges: bool = True,
    ) -> Any:
        """This rank's part of a model. tp or pp of the team is more than 1.

        Args:
            name: an alias, a local folder, perhaps of an adapter alone, or a hub id.
            scalar: with a scalar head, see `scalar_loading.load_scalar`.
            memory: where its weights are to lie; None: in a flat buffer of its own.
            merges: whether an adapter is merged into them; else they are those of its base.

        Returns:
            What `partial.part_of` makes of the whole model: a LanguageModel or a ScalarModel.

        Raises:
            LayoutError: the model does not allow the layout.
            ModelError: the checkpoint cannot be found or read, or the family is refused or cannot be cut like this.
        """
        model = self.without_weights(name, scalar=scalar)
        check(model.parameters, team.layout)
        adapter = adapter_of(name)
        base = name if adapter is None else adapter.base
        key = (base, scalar, team.layout)
        if key not in self._proven:
            self._proven[key] = self._prove(base, model, team, scalar)
            give_back_freed()
        values = self._values(base, model, scalar)
        if adapter is not None and merges:
            values = self._merged(values, model, adapter)
        cut_layers(model, team, tuple_length=self._proven[key].tuple_length)
        take_weights(model, team, values, self._device, memory)
        model.part = replace(model.part, cache=self._proven[key].cache)
        return model

    def stored(self, name: str, *, scalar: bool = False) -> Callable[[Block], Tensor | None] | None:
        """Where the blocks [*block.shape] of a model, whole or a part, are to be had in all digits: as they are stored,
        and what a merged adapter adds to them in float32; arguments as of `part`. None, for one block or for all: there
        are no more digits than the compute dtype has, weights are quantised, or tied ones are stored apart and differ.

        Raises:
            ModelError: the checkpoint cannot be found or read.
        """
        adapter = adapter_of(name)
        base = name if adapter is None else adapter.base
        if self._dtype != torch.bfloat16 or (adapter is None and not stores_finer(resolve(base), self._dtype)):
            return None
        model = self.without_weights(name, scalar=scalar)
        if (files := self._files(base, model)) is None:
            return None
        values = self._with_head(base, files.block, scalar)
        finer = lambda name: name == HEAD or files.is_finer(name)
        if adapter is None:
            return lambda block: values(block) if finer(block.param.name) else None
        from plait.models.lora_merging import Merging

        merging = Merging.of(model, adapter.folder)
        changed = lambda name: merging.changes(name) or finer(name)
        return lambda block: merging.block(block, values(block)) if changed(block.param.name) else None

    def _merged(self, values: Values, model: Any, adapter: AdapterFolder) -> Values:
        from plait.models.lora_merging import Merging

        merging = Merging.of(model, adapter.folder)
        return lambda block: merging.block(block, values(block))

    def without_weights(self, name: str, *, scalar: bool = False) -> Any:
        """The whole model, whose weights are on the meta device; arguments as of `part`.

        Raises:
            ModelError: as `parameters`.
        """
        return over_base(name, lambda base: self._of_checkpoint(base, scalar), without)

    def _of_checkpoint(self, name: str, scalar: bool) -> Any:
        if name not in self._read:
            self._read[name] = read_config(name)
        folder, config, tokenizer = self._read[name]
        with torch.random.fork_rng(devices=[]), parameters_on_meta():
            module = new_module(copy.deepcopy(config), self._dtype, decoder_only=scalar)
        if scalar:
            return scalar_loading.over_decoder(module, tokenizer, folder, self._head(name), self._dtype, self._device)
        if (stated := generation_of(folder)) is not None:
            module.generation_config = stated
        return without_weights(module, tokenizer, self._dtype, self._device)

    def _head(self, name: str) -> ScalarHead:
        folder, config, _ = self._read[name]
        return scalar_loading.head_of(folder, name, config, seed=self._drawn["seed"], std=self._drawn["head_std"])

    def _prove(self, name: str, model: Any, team: Team, scalar: bool) -> Proven:
        """Cut a smaller model of the same configuration, or the whole one, and give it back."""
        small, stages = scaled_down(model, name, team.layout.parallelism, self._device, scalar=scalar), ()
        if small is None:
            stages = team.layout.parallelism.stages
            small = load_scalar(name, **self._loaded, **self._drawn) if scalar else load_model(name, **self._loaded)
        sizes = replace(team.layout.parallelism, stages=stages)
        kinds = kinds_of(small)
        part = part_of(small, replace(team, layout=replace(team.layout, parallelism=sizes)))
        return Proven.of(part, kinds, kinds_of(model))

    def _values(self, name: str, model: Any, scalar: bool) -> Values:
        """Where the blocks of a model come from; its buffers that are stored are read."""
        if (files := self._files(name, model)) is None:
            return self._with_head(name, self._whole(name, model, scalar), scalar)
        kept = (model.module.base_model if scalar else model.module)._get_dtype_plan(self._dtype)
        for key in files.buffers:
            wide = next((dtype for part, dtype in kept.items() if re.search(part.replace("*", ".*"), key)), None)
            _set_buffer(model.module, key, files.tensor(key), wide)
        return self._with_head(name, files.block, scalar)

    def _files(self, name: str, model: Any) -> CheckpointFiles | None:
        with reading(name):
            return CheckpointFiles.of(self._read[name][0], model.module, model.parameters)

    def _with_head(self, name: str, read: Values, scalar: bool) -> Values:
        if not scalar:
            return read
        head_1H = self._head(name).weight_1H
        return lambda block: cut_block(head_1H, block) if block.param.name == HEAD else read(block)

    def _whole(self, name: str, model: Any, scalar: bool) -> Values:
        """From the module that Transformers reads, in host memory."""
        if (name, scalar) not in self._wholes:
            with scalar_loading.without_reports():
                module, _, _ = read_folder(name, self._dtype, decoder_only=scalar)
            self._wholes[name, scalar] = (
                ScalarModule(module, nn.Parameter(self._head(name).weight_1H)) if scalar else module
            )
        whole = self._wholes[name, scalar]
        for key, buffer in whole.named_buffers():
            _set_buffer(model.module, key, buffer, buffer.dtype)
        return cut_from(whole)


def _set_buffer(module: nn.Module, name: str, values: Tensor, dtype: torch.dtype | None) -> None:
    """dtype: of the buffer from now on; None: as it is."""
    owner, _, leaf = name.rpartition(".")
    holder = module.get_submodule(owner)
    setattr(holder, leaf, values.to(dtype or getattr(holder, leaf).dtype, copy=True))
