"""A local Hugging Face checkpoint folder, looked at before anything is loaded from it. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from pathlib import Path

from plait.errors import ModelError
from plait.models.files.claims import check_config, check_files, read_configuration, read_object
from plait.models.files.tensor_file import read_header
from plait.output import run_holding


@contextlib.contextmanager
def looking_at(name: str) -> Iterator[None]:
    """Raises ModelError where the system lets nobody look into a folder, or read a file there."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"model: {name!r} cannot be read: {error}") from error


def index_of(folder: Path) -> Path | None:
    """The index of a checkpoint's files; None: its tensors are in one, `model.safetensors`. Where both are there,
    Transformers reads the one file."""
    index = folder / "model.safetensors.index.json"
    return index if index.is_file() and not (folder / "model.safetensors").is_file() else None


def check_folder(folder: Path, name: str) -> None:
    """See that a folder holds a whole checkpoint, whose files say the same.

    Raises:
        ModelError: it does not.
        OSError: the folder, or a file in it, cannot be read.
    """
    _check_whole(folder, name)
    check_config_there(folder, name)
    if (index := index_of(folder)) is not None:
        try:
            files = sorted(set(read_object(index)["weight_map"].values()))
            if not files or not all(isinstance(file, str) and Path(file).name == file for file in files):
                raise ValueError("it must list names of files in the same folder")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"model: {index} is not a readable index of safetensors files: {error!r}") from error
    else:
        files = ["model.safetensors"]
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        if index is not None:
            raise ModelError(
                f"model: {name!r} lacks {len(missing)} of the {len(files)} files of weights that {index.name} names "
                f"({', '.join(missing[:3])}); fetch or copy it again."
            )
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        instead = f"it holds {', '.join(pickles)}, which are pickles" if pickles else "not found"
        raise ModelError(
            f"model: {name!r} should hold its weights as safetensors ({', '.join(missing[:3])}), {instead}. "
            "plait reads no pickles: save the model with save_pretrained, or set `model` to another one."
        )
    for file in files:
        try:
            read_header(folder / file)
        except ValueError as error:
            raise ModelError(f"model: {name!r} is damaged: {file}: {error}; fetch or copy it again.") from error
    config = read_configuration(folder / "config.json")
    check_config(config, name)
    check_files(folder, files, config, name)


def check_config_there(folder: Path, name: str) -> None:
    """Raises ModelError if the folder has no `config.json` or is a file; says so if it is the folder of a run."""
    if folder.is_file():
        kind = "a GGUF file, which holds weights for other programs" if folder.suffix == ".gguf" else "a file"
        raise ModelError(
            f"model: {name!r} is {kind}; expected a folder with config.json and safetensors, as Transformers' "
            "`save_pretrained` writes"
        )
    if (folder / "config.json").is_file():
        return
    run = run_holding(folder)
    if run is None:
        remedy = "but it holds no config.json; set `model` to the folder that does."
    elif folder.resolve() == run and (folder / "final").is_dir():
        remedy = f"but it is that of a run; its model is `{folder / 'final'}`."
    else:
        remedy = f"but it belongs to a run; `plait export {run} --out FOLDER` writes a checkpoint of it as a model."
    raise ModelError(f"model: {name!r} should be a Hugging Face checkpoint folder, {remedy}")


def _check_whole(folder: Path, name: str) -> None:
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ModelError(
            f"model: {name!r} holds only a LoRA adapter; give a full model here: "
            "`plait export RUN_DIR --out FOLDER` writes one of a run, peft's `merge_and_unload` of others."
        )


def nearest_folder(path: Path) -> Path | None:
    """The model folder beside `path`, which does not exist, whose name is most similar."""
    with contextlib.suppress(OSError):
        beside = [entry.name for entry in path.parent.iterdir() if (entry / "config.json").is_file()]
        if close := difflib.get_close_matches(path.name, beside, n=1, cutoff=0.5):
            return path.with_name(close[0])
    return None
