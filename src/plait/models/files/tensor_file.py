"""Safetensors files written as a stream: one tensor after the other, no second copy of the whole in memory.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian length of the header, a JSON header
padded with spaces, then the tensors' bytes without holes. The serialisers of the `safetensors` package want
all tensors at once; here a tensor's bytes are asked for when its turn comes and may be dropped after it.

This module knows bytes only: no torch, no NumPy.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait import json_text

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
MOST_HEADER_BYTES = 100_000_000
"""As in the `safetensors` package."""
CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: its name, its dtype as safetensors spells it (`F32`, `BF16` ...), its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Length of a written file and the CRC-32 of all its bytes: enough to tell a torn or rotten file."""

    size_bytes: int
    crc32: int


def file_bytes(entries: Sequence[TensorEntry], metadata: Mapping[str, str] | None = None) -> int:
    """Size in bytes of the file that `write_tensor_file` would write."""
    return len(_header(_in_file_order(entries), metadata)) + sum(entry.num_bytes for entry in entries)


def write_tensor_file(
    path: str | Path,
    entries: Sequence[TensorEntry],
    data: Callable[[TensorEntry], memoryview],
    metadata: Mapping[str, str] | None = None,
) -> FileDigest:
    """Write `path` and force it to disk; `data(entry)` gives a tensor's bytes, row-major, little-endian.

    Wide dtypes come first, so that every tensor is aligned to its item size for readers that map the file.

    Raises `OSError` as the file system gives it; what was written so far is left for the caller to remove.
    """
    assert len({entry.name for entry in entries}) == len(entries), "a tensor name stands twice in one file"
    entries = _in_file_order(entries)
    with open(path, "wb") as file:
        header = _header(entries, metadata)
        file.write(header)
        crc32, size_bytes = zlib.crc32(header), len(header)
        for entry in entries:
            payload = data(entry).cast("B")
            assert payload.nbytes == entry.num_bytes, f"{entry} got {payload.nbytes} bytes"
            for start in range(0, payload.nbytes, CHUNK_BYTES):
                chunk = payload[start : start + CHUNK_BYTES]
                file.write(chunk)
                crc32 = zlib.crc32(chunk, crc32)
            size_bytes += payload.nbytes
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(size_bytes, crc32)


def is_whole(path: str | Path) -> bool:
    """Whether `path` has a header and is as long as that says; reads only the header."""
    try:
        read_header(path)
    except (OSError, ValueError):
        return False
    return True


def read_header(path: str | Path) -> dict[str, dict[str, Any]]:
    """The entries of a file's tensors: name → dtype, shape, data_offsets.

    Raises:
        ValueError: it has no header, or is shorter or longer than that says.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        length = file.read(8)
        header_bytes = int.from_bytes(length, "little")
        if len(length) < 8 or header_bytes > min(size_bytes - 8, MOST_HEADER_BYTES):
            raise ValueError("it has no header")
        header = json_text.parse(file.read(header_bytes))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = 0
    for name, entry in entries.items():
        match entry:
            case {"dtype": str(), "shape": [*shape], "data_offsets": [int(start), int(stop)]}:
                if 0 <= start <= stop and all(type(size) is int and size >= 0 for size in shape):
                    end = max(end, stop)
                    continue
        raise ValueError(f"the entry of {name[:80]!r} in its header is damaged")
    if size_bytes != 8 + header_bytes + end:
        raise ValueError(f"it has {size_bytes} bytes, and {8 + header_bytes + end} by its header")
    return entries


def _in_file_order(entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    return sorted(entries, key=lambda entry: (-ITEM_BYTES[entry.dtype], entry.name))


def _header(entries: Sequence[TensorEntry], metadata: Mapping[str, str] | None) -> bytes:
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for entry in entries:
        table[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.num_bytes],
        }
        offset += entry.num_bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
