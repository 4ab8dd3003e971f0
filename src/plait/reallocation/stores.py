"""Files that moves read and write: each a safetensors file of flat buffers.

A file is read by mapping it: only the pages of the slices that are wanted are read. It is written under another name
and appears by one rename, when all of it is on disk.
"""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plait.errors import DataError, RunError
from plait.file_writes import why_not_written
from plait.layout.boxes import Slice
from plait.layout.holdings import ITEM_BYTES, Holdings
from plait.layout.mesh import Cluster
from plait.layout.move_plan import MoveAction, MoveKind, MovePlan
from plait.output import sync
from plait.reallocation.memory import DTYPES

_FILE_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
}


@dataclass(frozen=True)
class StoreFile:
    """The file of a store. lengths: buffer → elements."""

    path: Path
    lengths: Mapping[str, int]


def store_path(folder: str | Path, name: str, number: int) -> Path:
    """Where a store lies in a folder, by its number."""
    return Path(folder) / f"{name}-{number:05d}.safetensors"


def store_files(holdings: Holdings, cluster: Cluster, folder: str | Path, name: str) -> dict[int, StoreFile]:
    """Where the stores of `holdings` lie in a folder: `{name}-{number of the store}.safetensors`."""
    return {
        store: StoreFile(store_path(folder, name, store - cluster.num_devices), holdings.buffers[store])
        for store in sorted(holdings.ranks)
        if cluster.is_store(store)
    }


class StoreReader:
    """The buffers of stores as tensors that map the files. dtype: what the plan was made for."""

    def __init__(self, files: Mapping[int, StoreFile], dtype: str) -> None:
        self._files = files
        self._dtype = dtype
        self._buffers: dict[int, dict[str, Tensor]] = {}

    def buffer(self, store: int, name: str) -> Tensor:
        """One buffer [elements], not to be written to.

        Raises:
            DataError: the file is not there, is damaged, or has another dtype or length.
        """
        if store not in self._buffers:
            assert store in self._files, f"the plan reads store {store}, found files for {sorted(self._files)}"
            self._buffers[store] = self._open(self._files[store])
        return self._buffers[store][name]

    def _open(self, file: StoreFile) -> dict[str, Tensor]:
        try:
            with safe_open(file.path, "pt") as opened:
                buffers = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{file.path}: expected a whole safetensors file, found: {error}") from error
        for name, length in file.lengths.items():
            tensor = buffers.get(name)
            if tensor is None or tensor.shape != (length,) or tensor.dtype != DTYPES[self._dtype]:
                what = "no such tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise DataError(f"{file.path}: expected {name} as {self._dtype} [{length}], found {what}")
        return buffers


class StoreWriter:
    """The files that a rank writes. Each appears with the last of its actions; `discard` drops those not finished."""

    def __init__(self, files: Mapping[int, StoreFile], plan: MovePlan, rank: int, name: str) -> None:
        self._files = files
        self._dtype = plan.target_dtype
        self._name = name
        self._open: dict[int, _Writing] = {}
        row = plan.rows.get(rank, ())
        self._left = Counter(action.peer for action in row if action.kind is MoveKind.WRITE)
        for store in self._left:
            assert store in files, f"the plan writes store {store}, found files for {sorted(files)}"
            writers = [sender for sender, receiver in plan.traffic.link_bytes if receiver == store]
            assert writers == [rank], f"store {store} is written by ranks {writers}; give each its own"

    def write(self, store: int, values: Tensor, target: Slice) -> None:
        """Write values of any strides, in the shape of `target`, to a part of a buffer of the store.

        Raises:
            RunError: the file system refuses it, such as a full disk.
        """
        try:
            if store not in self._open:
                self._open[store] = _Writing(self._files[store], self._dtype)
            self._open[store].write(values, target)
        except OSError as error:
            raise self._refusal(store, error) from error

    def done(self, action: MoveAction) -> None:
        """Count an action as written; finish the file with the last.

        Raises:
            RunError: as `write`.
        """
        self._left[action.peer] -= 1
        if self._left[action.peer] == 0:
            try:
                self._open[action.peer].finish()
            except OSError as error:
                raise self._refusal(action.peer, error) from error
            del self._open[action.peer]

    def discard(self) -> None:
        for writing in self._open.values():
            writing.discard()
        self._open.clear()

    def _refusal(self, store: int, error: OSError) -> RunError:
        file = self._files[store]
        why = why_not_written(file.path, error)
        size = sum(file.lengths.values()) * ITEM_BYTES[self._dtype]
        return RunError(f"{self._name}: expected to write {size} bytes to {file.path}, found: {why}")


class _Writing:
    """A file under its temporary name."""

    def __init__(self, file: StoreFile, dtype: str) -> None:
        self._path = file.path
        self._part = file.path.with_name(file.path.name + ".tmp")
        self._dtype = DTYPES[dtype]
        table, end = {}, 0
        for name, length in sorted(file.lengths.items()):
            start, end = end, end + length * ITEM_BYTES[dtype]
            table[name] = {"dtype": _FILE_DTYPES[dtype], "shape": [length], "data_offsets": [start, end]}
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = struct.pack("<Q", len(text)) + text
        self._starts = {name: len(header) + entry["data_offsets"][0] for name, entry in table.items()}
        self._descriptor = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_at(self._descriptor, memoryview(header), 0)
            # Gaps between blocks, which nobody writes, are zeros.
            os.truncate(self._descriptor, len(header) + end)
        except OSError:
            self.discard()
            raise

    def write(self, values: Tensor, target: Slice) -> None:
        flat = values.to("cpu", self._dtype).contiguous().view(-1)
        data, size = flat.view(torch.uint8).numpy().data, self._dtype.itemsize
        start = 0
        for low, high in target.ranges():
            stop = start + high - low
            _write_at(self._descriptor, data[start * size : stop * size], self._starts[target.buffer] + low * size)
            start = stop

    def finish(self) -> None:
        os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
        os.rename(self._part, self._path)
        sync(self._path.parent)

    def discard(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._part.unlink(missing_ok=True)


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
