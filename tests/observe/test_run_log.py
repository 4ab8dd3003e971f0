import json
import math
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import RunError
from plait.observe.run_log import RunLog, cut_torn_line, encode_row, read_rows, truncate_to, write_rows
from tests.forked import exit_code_of, forked


def test_rows_come_back_and_offsets_are_the_places_between_them(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    offsets = [0]
    with RunLog(path) as log:
        for step in range(1, 4):
            log.append({"step": step, "reward": 0.1 * step})
            offsets.append(log.offset)
            assert path.stat().st_size == log.offset, "a row is with the operating system once append returns"
    assert read_rows(path) == [{"step": step, "reward": 0.1 * step} for step in (1, 2, 3)]

    truncate_to(path, offsets[1])
    with RunLog(path, resume=True) as log:
        assert log.offset == offsets[1]
        log.append({"step": 2, "reward": 9})
    assert [row["step"] for row in read_rows(path)] == [1, 2]
    RunLog(path).close()
    assert read_rows(path) == [], "without resume a log begins anew"


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_come_back_bit_by_bit(value: float):
    assert json.loads(encode_row({"x": value}))["x"].hex() == value.hex()


def test_non_finite_and_numpy_values():
    row = {"a": math.nan, "b": math.inf, "c": [-math.inf], "d": np.float32(0.1), "e": np.int64(3), "f": np.bool_(True)}
    line = encode_row({**row, "g": np.float64(0.5), "h": None, "i": {"j": (1, 2)}})
    back = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert back["a"] == "NaN"
    assert math.isnan(float(back["a"]))
    assert float(back["b"]) == math.inf
    assert float(back["c"][0]) == -math.inf
    assert back["d"] == float(np.float32(0.1))
    assert (back["e"], back["f"], back["g"], back["h"], back["i"]) == (3, True, 0.5, None, {"j": [1, 2]})


@given(st.text())
def test_any_text_stays_one_line(text: str):
    line = encode_row({"text": text})
    assert line.count(b"\n") == 1
    assert json.loads(line)["text"] == text


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("a\udc80b", "a\ufffdb"),
        ("\ud83d\ude00 \ud83d", "\U0001f600 \ufffd"),
        ({"\udc80": "\\\udc80"}, {"\ufffd": "\\\ufffd"}),
        (10**308 - 1, 10**308 - 1),
        (-(10**400), str(-(10**400))),
    ],
)
def test_what_functions_log_is_read_again(tmp_path: Path, value: object, read: object):
    """Half a surrogate pair is no character, and a number beyond all floats none that other readers take."""
    path = tmp_path / "samples.jsonl"
    write_rows(path, [{"logged": value}])
    assert read_rows(path) == [{"logged": read}]


def test_values_that_no_log_can_hold_are_our_own_faults():
    with pytest.raises(AssertionError, match=r"row\.x holds a set"):
        encode_row({"x": {1}})
    with pytest.raises(AssertionError, match="keys of a log row are strings"):
        encode_row({"x": {1: 2}})


@given(st.binary(max_size=40).filter(lambda tail: b"\n" not in tail))
def test_a_torn_line_is_cut_and_nothing_else(tmp_path_factory: pytest.TempPathFactory, tail: bytes):
    path = tmp_path_factory.mktemp("log") / "x.jsonl"
    whole = encode_row({"step": 1}) + encode_row({"step": 2})
    path.write_bytes(whole + tail)
    assert read_rows(path) == [{"step": 1}, {"step": 2}]
    assert cut_torn_line(path) == len(tail)
    assert path.read_bytes() == whole


def test_a_torn_line_longer_than_what_is_read_at_once(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\n' + b"x" * 300_000)
    assert cut_torn_line(path) == 300_000
    path.write_bytes(b"x" * 200_000)
    assert cut_torn_line(path) == 200_000
    assert path.read_bytes() == b""


def test_a_log_shorter_than_its_checkpoint_says_is_refused(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"{}\n")
    with pytest.raises(RunError, match=r"at least 10 bytes.*holds 3"):
        truncate_to(path, 10)
    with pytest.raises(RunError, match="holds 0"):
        truncate_to(tmp_path / "absent", 1)
    truncate_to(tmp_path / "absent", 0)


@pytest.mark.process
def test_a_full_disk_leaves_whole_rows_only(tmp_path: Path):
    """A limit on the size of files stands for the full disk: the kernel cuts the write and then refuses it."""
    path = tmp_path / "x.jsonl"

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        log = RunLog(path)
        room = 100 // len(encode_row({"step": 1}))
        for step in range(room):
            log.append({"step": step})
        with pytest.raises(RunError, match=r"x\.jsonl cannot be written: File too large: here a file may have 100 b"):
            log.append({"step": room})
        with pytest.raises(RunError, match=r"samples\.jsonl cannot be written"):
            write_rows(tmp_path / "samples.jsonl", [{"text": "x" * 200}])

    assert exit_code_of(forked(work)) == 0
    assert read_rows(path) == [{"step": step} for step in range(100 // len(encode_row({"step": 1})))]
    assert path.read_bytes().endswith(b"}\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.jsonl"]
