"""The data and models that a recipe names by local paths, and digests by which they are known again.

Data sets and models of the hub, and folders that `datasets` saved, go by their names alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from plait.data.settings import DataSettings
from plait.models.files.hub import MODEL_FILES
from plait.recipes.recipe import Recipe

_SAMPLED_BYTES, _BLOCKS, _BLOCK_BYTES = 1 << 20, 64, 1 << 12
"""A model's file that is larger is read in so many blocks, evenly spread: training changes all of them."""


def named_inputs(recipe: Recipe) -> dict[str, Path]:
    """Key → the data file, or the folder of a model, that is there under its value."""
    named = {key: Path(source) for key, source in _sources(recipe)}
    found = {key: path for key, path in named.items() if os.path.isfile(path)}
    for key, name in recipe.models_named().items():
        if os.path.isdir(name):
            found[key] = Path(name)
    return {key: path.resolve() for key, path in found.items()}


def digest_of(path: Path) -> str:
    """SHA-256 in hexadecimal digits of a file; of a model's folder that of its files' names and sizes, and of what they
    hold, large ones by an even sample.

    Raises:
        OSError: it cannot be read.
    """
    if path.is_file():
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    for file in sorted({file for pattern in MODEL_FILES for file in path.glob(pattern) if file.is_file()}):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        for block in _blocks(file):
            digest.update(block)
    return digest.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size <= _SAMPLED_BYTES:
            yield file.read()
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
            if source.evaluation_source is not None:
                yield f"{key}.evaluation_source", source.evaluation_source
