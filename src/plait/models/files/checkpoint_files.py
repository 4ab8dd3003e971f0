"""The tensors of a Hugging Face checkpoint, block by block: a file is a layout, of which a rank reads its own part.

Files are mapped, one tensor at a time, so that only the pages of a block are read, and none stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from plait.errors import ModelError
from plait.layout.params import Block, Param, Parameters
from plait.models.files.claims import read_object
from plait.models.flat_weights import cut_block


@dataclass(frozen=True)
class CheckpointFiles:
    """Where each parameter of a model is stored.

    stored: parameter → (file, its name there)
    """

    stored: dict[str, tuple[Path, str]]

    @classmethod
    def of(
        cls, folder: Path, module: Any, parameters: Parameters, *, own: Sequence[str] = ()
    ) -> CheckpointFiles | None:
        """Those of a folder; None where its tensors are not the module's, one for one: Transformers then converts them
        (stacks or splits them, gives them other names, undoes a quantisation), or buffers are stored with them.

        Args:
            module: of Transformers, or a ScalarModule, perhaps without weights.
            own: parameters that the checkpoint need not have.
        """
        if _is_converted(module) or read_object(folder / "config.json").get("quantization_config"):
            return None
        params = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        if module.state_dict().keys() - params:
            return None
        files = _files_of(folder)
        names: dict[str, list[str]] = {param.name: [param.name] for param in parameters.params}
        for alias, name in parameters.aliases.items():
            names[name].append(alias)
        stored: dict[str, tuple[Path, str]] = {}
        for param in parameters.params:
            if param.name in own:
                continue
            spelled = [s for name in names[param.name] for s in _spellings(name, module.base_model_prefix)]
            stored_names = [name for name in dict.fromkeys(spelled) if name in files]
            if len(stored_names) != 1:  # none, or tied names that need not be equal
                return None
            stored[param.name] = (files[stored_names[0]], stored_names[0])
        read = cls(stored)
        fits = all(read.shape(param) == param.shape for param in parameters.params if param.name not in own)
        return read if fits else None

    def shape(self, param: Param) -> tuple[int, ...]:
        path, name = self.stored[param.name]
        with safe_open(path, "pt") as opened:
            return tuple(opened.get_slice(name).get_shape())

    def block(self, block: Block) -> Tensor:
        """A rank's block of a parameter [*block.shape]: a view of the mapped file, to be copied and dropped.

        Raises:
            ModelError: the file is gone or damaged.
        """
        path, name = self.stored[block.param.name]
        try:
            with safe_open(path, "pt") as opened:
                return cut_block(opened.get_tensor(name), block)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"model: {path} should hold {name}, found: {error}; fetch or copy it again.") from error


def stores_finer_than_bfloat16(folder: Path) -> bool:
    """Whether some tensor of a checkpoint is stored in numbers of more digits. Reads headers alone."""
    for path in set(_files_of(folder).values()):
        with safe_open(path, "pt") as opened:
            if any(opened.get_slice(name).get_dtype() != "BF16" for name in opened.keys()):  # noqa: SIM118
                return True
    return False


def _files_of(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {name: folder / file for name, file in read_object(index)["weight_map"].items()}
    with safe_open(folder / "model.safetensors", "pt") as opened:
        return dict.fromkeys(opened.keys(), folder / "model.safetensors")


def _spellings(name: str, prefix: str) -> tuple[str, ...]:
    """A checkpoint of the decoder alone leaves its prefix out."""
    inner = name.removeprefix(f"{prefix}.")
    return (name,) if inner == name else (name, inner)


def _is_converted(module: Any) -> bool:
    from transformers.conversion_mapping import get_model_conversion_mapping

    causal = module if hasattr(module, "is_custom_code") else module.base_model
    return bool(get_model_conversion_mapping(causal, add_legacy=False))
