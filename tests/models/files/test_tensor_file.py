import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from plait.models.files.tensor_file import ITEM_BYTES, TensorEntry, file_bytes, is_whole, write_tensor_file

ARRAYS = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a": np.array([1.5], dtype=np.float64),
    "scalar": np.array(7, dtype=np.int64),
    "flags": np.array([True, False, True]),
    "empty": np.zeros((0, 4), dtype=np.float32),
}
NAMES = {"float32": "F32", "float64": "F64", "int64": "I64", "bool": "BOOL"}
ENTRIES = [TensorEntry(name, NAMES[str(array.dtype)], array.shape) for name, array in ARRAYS.items()]


def data(entry: TensorEntry) -> memoryview:
    array = ARRAYS[entry.name]
    return array.reshape(-1).data if array.size else memoryview(b"")


def test_the_safetensors_package_reads_what_is_written(tmp_path: Path):
    digest = write_tensor_file(tmp_path / "x.safetensors", ENTRIES, data, {"format": "pt"})
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)
    content = (tmp_path / "x.safetensors").read_bytes()
    assert (digest.size_bytes, digest.crc32) == (len(content), zlib.crc32(content))
    assert file_bytes(ENTRIES, {"format": "pt"}) == len(content)


def test_every_tensor_is_aligned_to_its_item_size(tmp_path: Path):
    write_tensor_file(tmp_path / "x.safetensors", ENTRIES, data)
    content = (tmp_path / "x.safetensors").read_bytes()
    (header_bytes,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + header_bytes])
    for entry in ENTRIES:
        assert (8 + header_bytes + header[entry.name]["data_offsets"][0]) % ITEM_BYTES[entry.dtype] == 0


def test_a_torn_file_is_told_from_a_whole_one(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    size = write_tensor_file(path, ENTRIES, data).size_bytes
    assert is_whole(path)
    content = path.read_bytes()
    for length in (0, 5, 40, size - 1):
        path.write_bytes(content[:length])
        assert not is_whole(path), length
    path.write_bytes(content + b"x")
    assert not is_whole(path)
    assert not is_whole(tmp_path / "absent.safetensors")


def test_wrong_payload_and_double_names_are_our_own_faults(tmp_path: Path):
    with pytest.raises(AssertionError, match="4 bytes"):
        write_tensor_file(tmp_path / "x", [TensorEntry("a", "F32", (2,))], lambda _: memoryview(b"1234"))
    with pytest.raises(AssertionError, match="twice"):
        write_tensor_file(tmp_path / "x", [ENTRIES[0], ENTRIES[0]], data)
