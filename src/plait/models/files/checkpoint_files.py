"""The tensors of a Hugging Face checkpoint, block by block: a file is a layout, of which a rank reads its own part.

Files are mapped, one tensor at a time, so that only the pages of a block are read, and none stays. Where a tensor of
the module is made of several stored ones, or several of one, those alone are read for it and converted
(`conversion`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plait.errors import ModelError
from plait.layout.decoder import HEAD
from plait.layout.params import Block, Param, Parameters
from plait.models.files.checkpoint_folder import index_of
from plait.models.files.claims import read_configuration, read_object
from plait.models.files.conversion import Conversion, Group
from plait.models.flat_weights import cut_block


@dataclass(frozen=True)
class Stored:
    """A tensor in a file of a checkpoint. dtype: by its name in safetensors."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class CheckpointFiles:
    """Where each parameter and persistent buffer of a model is stored.

    Args:
        stored: name in the checkpoint → its tensor.
        groups: name of a tensor of the model → what it is made of, and its name there.
        buffers: names of the model's persistent buffers, as in `groups`.
    """

    def __init__(
        self,
        stored: dict[str, Stored],
        conversion: Conversion,
        groups: dict[str, tuple[Group, str]],
        buffers: Sequence[str],
    ) -> None:
        self._stored, self._conversion, self._groups = stored, conversion, groups
        self.buffers = tuple(buffers)
        self._last: tuple[Group, dict[str, Tensor]] | None = None
        """What was converted last, if several tensors were made at once: the next one may be among them."""

    @classmethod
    def of(cls, folder: Path, module: Any, parameters: Parameters) -> CheckpointFiles | None:
        """Those of a folder, but for the head of a scalar model; None where a tensor is missing or has another shape,
        tied ones are stored apart and are not equal, or weights are quantised.

        Args:
            module: of Transformers, or a ScalarModule, perhaps without weights.

        Raises:
            ValueError, and others of Transformers: stored tensors cannot be converted.
        """
        if read_configuration(folder / "config.json").get("quantization_config"):
            return None
        causal = module if hasattr(module, "is_custom_code") else module.base_model
        prefix = "" if causal is module else f"{module.base_model_prefix}."
        stored = stored_in(folder)
        conversion = Conversion(causal, stored)
        made: dict[str, tuple[Group, str]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for group in conversion.groups:
            blank = lambda name: torch.empty(stored[name].shape, device="meta")
            for name, tensor in conversion.convert(group, blank).items():
                made[prefix + name], shapes[prefix + name] = (group, name), tuple(tensor.shape)
        files = cls(stored, conversion, made, ())
        groups: dict[str, tuple[Group, str]] = {}
        for param in parameters.params:
            if param.name != HEAD:
                names = [name for name in _names(param, parameters) if name in made]
                if not names or shapes[names[0]] != param.shape or not files._are_equal(names):
                    return None
                groups[param.name] = made[names[0]]
        params = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        buffers = [name for name in module.state_dict() if name not in params]
        if any(name not in made for name in buffers):
            return None
        return cls(stored, conversion, groups | {name: made[name] for name in buffers}, buffers)

    def block(self, block: Block) -> Tensor:
        """A rank's block of a parameter [*block.shape], in the dtype that it is stored in: perhaps a view of the mapped
        file, to be copied and dropped.

        Raises:
            ModelError: a file is gone or damaged.
        """
        return cut_block(self.tensor(block.param.name), block)

    def tensor(self, name: str) -> Tensor:
        """A whole parameter or persistent buffer [*its shape]; otherwise as `block`."""
        group, made_as = self._groups[name]
        if self._last is not None and self._last[0] is group:
            return self._last[1][made_as]
        self._last = None
        with contextlib.ExitStack() as stack:
            opened: dict[Path, Any] = {}

            def read(stored: str) -> Tensor:
                file = self._stored[stored].file
                try:
                    if file not in opened:
                        opened[file] = stack.enter_context(safe_open(file, "pt"))
                    return opened[file].get_tensor(stored)
                except (OSError, SafetensorError) as error:
                    raise ModelError(
                        f"model: {file} should hold {stored}, found: {error}; fetch or copy it again."
                    ) from error

            made = self._conversion.convert(group, read)
        if len(made) > 1:
            self._last = group, made
        return made[made_as]

    def is_finer(self, name: str) -> bool:
        """Whether something that a parameter is made of is stored in numbers of more digits than bfloat16 has."""
        return any(_is_finer(self._stored[stored]) for stored in self._groups[name][0].stored)

    def _are_equal(self, names: Sequence[str]) -> bool:
        first, *others = names
        return all(torch.equal(self.tensor(first), self.tensor(other)) for other in others)


def stores_finer(folder: Path, dtype: torch.dtype) -> bool:
    """Whether some tensor of a checkpoint is stored in numbers of more digits than a compute dtype has. Reads headers
    alone."""
    return dtype == torch.bfloat16 and any(map(_is_finer, stored_in(folder).values()))


def stored_in(folder: Path) -> dict[str, Stored]:
    """The tensors of a checkpoint by their names in it. Reads headers alone."""
    files = {folder / "model.safetensors"}
    if (index := index_of(folder)) is not None:
        files = {folder / file for file in read_object(index)["weight_map"].values()}
    stored: dict[str, Stored] = {}
    for file in sorted(files):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                view = opened.get_slice(name)
                stored[name] = Stored(file, tuple(view.get_shape()), view.get_dtype())
    return stored


def _is_finer(stored: Stored) -> bool:
    return stored.dtype != "BF16"


def _names(param: Param, parameters: Parameters) -> list[str]:
    return [param.name, *(alias for alias, name in parameters.aliases.items() if name == param.name)]
