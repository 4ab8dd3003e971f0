"""Files of a checkpoint: written to the disk for good, and known by length and hash."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from plait.models.files.tensor_file import FileDigest

_READ_BYTES = 16 << 20


def write_durably(path: Path, content: bytes) -> FileDigest:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(len(content), zlib.crc32(content))


def digest_of(path: Path) -> FileDigest:
    """The digest of a file as it is."""
    return digest_of_size(path, path.stat().st_size)


def digest_of_size(path: Path, size_bytes: int) -> FileDigest:
    """Read the file's digest; a file whose length is not `size_bytes` is not read through."""
    found_bytes = path.stat().st_size
    if found_bytes != size_bytes:
        return FileDigest(found_bytes, -1)
    crc32 = 0
    with open(path, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            crc32 = zlib.crc32(chunk, crc32)
    return FileDigest(found_bytes, crc32)
