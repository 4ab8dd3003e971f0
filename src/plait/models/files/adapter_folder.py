"""Folders that hold a LoRA adapter alone, as peft, TRL and plait write them: what it was trained on. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from plait.errors import ModelError
from plait.json_text import parse
from plait.models.files.tensor_file import read_header
from plait.models.lora_settings import ALL_LINEAR, NO_LORA, LoraSettings
from plait.paths import at_home

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class AdapterFolder:
    """A local folder with an adapter and no whole model."""

    folder: Path
    base: str
    """The model that it was trained on: `base_model_name_or_path` of its configuration."""
    scores: bool
    """Whether it was trained on a scalar model, whose head lies beside it."""
    settings: LoraSettings
    """What its configuration says; of rank 0 where that is nothing that can be read."""

    @property
    def has_tokenizer(self) -> bool:
        return (self.folder / "tokenizer_config.json").is_file()


def adapter_of(name: str) -> AdapterFolder | None:
    """The adapter that a model's name means; None where it means something else.

    Raises:
        ModelError: the folder does not say what the adapter was trained on, or says that it was another adapter.
        ConfigError: as of `paths.at_home`.
    """
    folder = Path(at_home(name, "model"))
    if not _is_adapter(folder):
        return None
    try:
        config = parse((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"model: the adapter {name!r} has no readable {CONFIG}: {error}") from error
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"model: {folder / CONFIG} does not say which model the adapter was trained on; set "
            "`base_model_name_or_path` there to a local folder or a hub id"
        )
    if _is_adapter(Path(at_home(base, f"model: `base_model_name_or_path` in {folder / CONFIG}"))):
        raise ModelError(
            f"model: {folder / CONFIG} says that the adapter was trained on {base!r}, which is itself only an "
            "adapter; set `base_model_name_or_path` there to the base model of both"
        )
    saved = config.get("modules_to_save")
    scores = config.get("task_type") == "SEQ_CLS" or (isinstance(saved, list) and "score" in saved)
    return AdapterFolder(folder, base, scores, _settings(config))


def _settings(config: Mapping[str, Any]) -> LoraSettings:
    linear, experts = config.get("target_modules"), config.get("target_parameters")
    if not isinstance(linear, list):  # none beside experts, or a pattern
        linear = [] if linear is None and experts else [ALL_LINEAR]
    try:
        named = (*linear, *(experts if isinstance(experts, list) else ()))
        return LoraSettings(rank=config["r"], alpha=config["lora_alpha"], target_modules=named)
    except (KeyError, ValidationError):
        return NO_LORA


def _is_adapter(folder: Path) -> bool:
    return os.path.isfile(folder / CONFIG) and not os.path.isfile(folder / "config.json")


def check_weights(adapter: AdapterFolder, name: str) -> None:
    """Raises ModelError where the file of an adapter's tensors is missing, or is not as long as its header says."""
    file = adapter.folder / WEIGHTS
    try:
        read_header(file)
    except OSError as error:
        others = ", ".join(sorted(path.name for path in adapter.folder.glob("*.bin")))
        instead = f"; it holds {others}, and plait reads no pickles" if others else ""
        raise ModelError(
            f"model: the adapter {name!r} should hold its weights in {WEIGHTS}: {error.strerror}{instead}; save it "
            "with peft's save_pretrained, or fetch or copy it again"
        ) from error
    except ValueError as error:
        raise ModelError(f"model: {str(file)!r} is damaged: {error}; fetch or copy it again") from error


def base_missing(name: str, adapter: AdapterFolder, error: ModelError) -> ModelError:
    """The error of an adapter's base that cannot be loaded: it names the adapter and the file that names the base."""
    return ModelError(
        f"model: the adapter {name!r} was trained on {adapter.base!r}, which cannot be loaded; correct "
        f"`base_model_name_or_path` in {adapter.folder / CONFIG}. {error}"
    )
