"""The data and models that a recipe names by local paths, and digests by which they are known again.

Data sets and models of the hub go by their names alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from plait.data.files import is_saved, saved_folder
from plait.data.settings import DataSettings
from plait.models.files.adapter_folder import adapter_of
from plait.models.files.hub import MODEL_FILES
from plait.paths import at_home
from plait.recipes.evaluation_sets import evaluation_sets
from plait.recipes.recipe import Recipe

_SAMPLED_BYTES, _BLOCKS, _BLOCK_BYTES = 1 << 20, 64, 1 << 12
"""A model's file that is larger is read in so many blocks, evenly spread: training changes all of them."""
SAID_BYTES = 1 << 28
"""To read more may take seconds, which is said."""
_ROWS = ("*.arrow", "state.json")
"""Files of a saved data set: its rows, and which of their columns are given in which order."""
_ANY_TEXTS = ("*.json", "*.txt")
_TEXTS = (
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "*processor_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*.json",
    "vocab*.json",
    "vocab*.txt",
    "merges*.txt",
    "tekken.json",
)
"""Such as a model is made of; whoever trained or uses it may have left others beside them."""
_CACHED = "cache-"
"""Names of what `datasets` computed from a saved data set, and left beside it, begin so."""


def named_inputs(recipe: Recipe) -> dict[str, Path]:
    """Key → the data file, or the folder of a saved data set or of a model, that is there under its value; of a model
    that is an adapter also the one that it was trained on."""
    found: dict[str, Path] = {}
    for key, source in _sources(recipe):
        if (folder := saved_folder(source, key)) is not None:
            found[key] = folder
        elif os.path.isfile(source):
            found[key] = Path(source)
    for key, name in recipe.models_named().items():
        if os.path.isdir(name):
            found[key] = Path(name)
            if (adapter := adapter_of(name)) is not None and os.path.isdir(base := at_home(adapter.base, key)):
                found[f"{key} (what its adapter was trained on)"] = Path(base)
    return {key: path.resolve() for key, path in found.items()}


def said_of_reading(inputs: Mapping[str, Path]) -> str | None:
    """A line for the user where the digests of inputs take long: what is read, and how much. None: they do not."""
    sizes = {key: _read_bytes(path) for key, path in inputs.items()}
    if (total := sum(sizes.values())) <= SAID_BYTES:
        return None
    long = [f"`{key}` ({size / 2**30:.1f} GiB)" for key, size in sizes.items() if size * len(sizes) * 2 > total]
    return f"reading all of {' and '.join(long)}: a resumed run says whether it has changed"


def digest_of(path: Path) -> str:
    """SHA-256 in hexadecimal digits of a file; of a folder that of its files' names and sizes, and of what they hold:
    of a saved data set all of it, of a model's large files an even sample.

    Raises:
        OSError: it cannot be read.
    """
    if path.is_file():
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    for file in _files(path):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        for block in _blocks(file, is_whole=is_saved(path)):
            digest.update(block)
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    """Those by which a folder is known, in the order of their names."""
    of_a_model = (*(pattern for pattern in MODEL_FILES if pattern not in _ANY_TEXTS), *_TEXTS)
    patterns = _ROWS if is_saved(folder) else of_a_model
    found = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    return sorted(file for file in found if not file.name.startswith(_CACHED))


def _read_bytes(path: Path) -> int:
    """What `digest_of` reads; 0 where it cannot."""
    try:
        if path.is_dir() and not is_saved(path):
            return sum(min(_SAMPLED_BYTES, file.stat().st_size) for file in _files(path))
        return sum(file.stat().st_size for file in ([path] if path.is_file() else _files(path)))
    except OSError:
        return 0


def _blocks(path: Path, *, is_whole: bool) -> Iterator[bytes]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        if is_whole or size <= _SAMPLED_BYTES:
            while block := file.read(_SAMPLED_BYTES):
                yield block
            return
        for block in range(_BLOCKS):
            file.seek(block * (size - _BLOCK_BYTES) // (_BLOCKS - 1))
            yield file.read(_BLOCK_BYTES)


def _sources(recipe: Recipe) -> Iterator[tuple[str, str]]:
    sections: dict[str, DataSettings | None] = {"data": recipe.data, "pretraining": recipe.pretraining}
    for name, section in sections.items():
        for place, source in enumerate(section.sources if section is not None else ()):
            key = name if place == 0 else f"{name}.more[{place - 1}]"
            yield f"{key}.source", source.source
    for one in evaluation_sets(recipe):
        if one.source is not None:
            yield f"{one.section}.source", one.source.source
