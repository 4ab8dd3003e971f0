"""Weights of an open run as a folder that Transformers or peft load; `export` writes those of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from plait.errors import ModelError, RunError
from plait.models.files.saving import save_pretrained
from plait.models.model import Model
from plait.output import why_not_written


def write_weights(model: Model, folder: Path, what: str, *, adapter: bool) -> None:
    """A model with its weights as they are.

    Args:
        what: for the error.
        adapter: its adapter alone, in peft's form.

    Raises:
        RunError: the weights are not finite, or the disk is full.
    """
    try:
        if adapter:
            from plait.models.lora_files import save_adapter

            save_adapter(model, folder)
        else:
            save_pretrained(model, folder)
    except OSError as error:
        raise RunError(f"{what} cannot be written to {folder}: {why_not_written(folder, error)}") from error
    except (SafetensorError, ModelError) as error:
        raise RunError(f"{what} cannot be written to {folder}: {error}") from error
