"""Files of a checkpoint: written to the disk for good, and known by length and hash."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from plait.models.files.tensor_file import FileDigest
from plait.schedule.work import MOVED_ON, Work, to_the_end

_READ_BYTES = 16 << 20


def write_durably(path: Path, content: bytes) -> FileDigest:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(len(content), zlib.crc32(content))


def digest_of_size(path: Path, size_bytes: int) -> FileDigest:
    """Read the file's digest; a file whose length is not `size_bytes` is not read through."""
    found_bytes = path.stat().st_size
    if found_bytes != size_bytes:
        return FileDigest(found_bytes, -1)
    return to_the_end(digesting(path))


def digesting(path: Path) -> Work[FileDigest]:
    """Read the digest of a file as it is, a part per `next()`."""
    size_bytes = crc32 = 0
    with open(path, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            size_bytes, crc32 = size_bytes + len(chunk), zlib.crc32(chunk, crc32)
            yield MOVED_ON
    return FileDigest(size_bytes, crc32)
