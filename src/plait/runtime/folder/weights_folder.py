"""Weights of an open run as a folder that Transformers or peft load; `export` writes those of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from plait.errors import ModelError, RunError
from plait.file_writes import why_not_written
from plait.models.files.saving import save_pretrained
from plait.models.model import Model


def marker_of(run_dir: Path, step: int, role: str) -> dict[str, Any]:
    """What is said in a folder of weights: whose they are."""
    from plait import __version__

    return {"run": run_dir.resolve().name, "step": step, "role": role, "plait": __version__}


def write_weights(model: Model, folder: Path, what: str, marker: Mapping[str, Any], *, adapter: bool) -> None:
    """A model with its weights as they are.

    Args:
        what: for the error.
        marker: see `marker_of`.
        adapter: its adapter alone, in peft's form.

    Raises:
        RunError: the weights are not finite, or the disk is full.
    """
    try:
        if adapter:
            from plait.models.lora_files import save_adapter

            save_adapter(model, folder, marker=marker)
        else:
            save_pretrained(model, folder, marker=marker)
    except OSError as error:
        raise RunError(f"{what} cannot be written to {folder}: {why_not_written(folder, error)}") from error
    except (SafetensorError, ModelError) as error:
        raise RunError(f"{what} cannot be written to {folder}: {error}") from error
