import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import DataError
from plait.observe.trace import read_trace
from plait.schedule.timeline import MemoryPoint, Span, Timeline, load_any, write_chrome_trace

seconds = st.floats(0, 1e6, allow_nan=False)
names = st.text(max_size=12)
spans = st.builds(
    Span,
    action=names,
    kind=names,
    rank=st.integers(0, 64),
    start_s=seconds,
    end_s=seconds,
    bytes=st.integers(0, 2**50),
    tokens=st.integers(0, 2**40),
    lane=names,
    role=names,
    step=st.none() | st.integers(0, 10**6),
    samples=st.integers(0, 2**20),
    drawn=st.integers(0, 2**20),
)
points = st.builds(MemoryPoint, rank=st.integers(0, 64), time_s=seconds, held=seconds)
timelines = st.builds(
    Timeline,
    spans=st.lists(spans, max_size=5).map(tuple),
    memory=st.lists(points, max_size=5).map(tuple),
    source=st.sampled_from(["predicted", "measured"]),
)


@given(timelines)
def test_the_file_form_reads_back(timeline):
    assert Timeline.from_json(timeline.to_json()) == timeline


TWO = Timeline(
    (
        Span("b", "B", 1, 2.0, 5.0, role="actor"),
        Span("a", "F", 0, 1.0, 2.0, bytes=8, step=4),
        Span("s", "SEND_F", 0, 1.5, 4.0, lane="link"),
        Span("c", "F", 0, 3.0, 4.5),
        Span("d", "DECODE", 1, 1.0, 1.5, tokens=12, samples=3, drawn=7),
    ),
    memory=(MemoryPoint(0, 1.0, 3.0), MemoryPoint(0, 2.0, 7.0), MemoryPoint(0, 3.0, 1.0)),
)


def test_sums_of_a_timeline():
    assert TWO.makespan_s == 4.0
    assert TWO.ranks == (0, 1)
    assert TWO.peak_memory(0) == 7.0
    assert TWO.peak_memory(1) == 0.0
    assert TWO.shifted(1.0).spans[1].end_s == 3.0
    assert TWO.shifted(1.0).makespan_s == TWO.makespan_s
    assert Timeline(()).makespan_s == 0.0


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    """Windows' editors put one before a text."""
    plain, marked = tmp_path / "plain", tmp_path / "marked"
    for write in (TWO.save, lambda path: write_chrome_trace(path, TWO)):
        write(plain)
        marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes().replace(b"\n", b"\r\n"))
        assert load_any(marked) == load_any(plain)


def test_the_chrome_trace_holds_every_span_and_the_memory_curve(tmp_path):
    write_chrome_trace(tmp_path / "t.json", TWO)
    events = read_trace(tmp_path / "t.json")
    assert {event["name"] for event in events if event["ph"] == "X"} == {"a", "b", "c", "d", "s"}
    assert [event["args"]["memory held"] for event in events if event["ph"] == "C"] == [3.0, 7.0, 1.0]
    (a,) = [event for event in events if event["name"] == "a"]
    assert a["args"] == {"kind": "F", "bytes": 8, "step": 4}
    (d,) = [event for event in events if event["name"] == "d"]
    assert d["args"] == {"kind": "DECODE", "tokens": 12, "samples": 3, "drawn": 7}


def test_a_chrome_trace_is_read_back_as_a_timeline(tmp_path):
    write_chrome_trace(tmp_path / "trace.json", TWO)
    TWO.save(tmp_path / "timeline.json")
    assert load_any(tmp_path / "trace.json").ordered().spans == TWO.ordered().spans
    assert load_any(tmp_path / "timeline.json") == TWO
    record = json.loads(TWO.to_json())  # as before spans had `samples` and `drawn`
    fewer = {"span_fields": record["span_fields"][:-2], "spans": [row[:-2] for row in record["spans"]]}
    older = Timeline.from_json(json.dumps(record | fewer))
    assert older.spans == tuple(replace(span, samples=0, drawn=0) for span in TWO.spans)
    (tmp_path / "other.json").write_text('[{"a": 1}]')
    for name in ("other.json", "none.json"):
        with pytest.raises(DataError, match=name):
            load_any(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "does not parse"),
        ("[]", "expected a timeline file"),
        ('{"format": "plait-timeline", "version": 99}', "version 1, found 99"),
        (TWO.to_json().replace('"kind"', '"sort"'), "does not fit its fields"),
        (TWO.to_json().replace('["c",', "["), "does not fit its fields"),
    ],
)
def test_what_is_no_timeline_is_refused(text, message):
    with pytest.raises(DataError, match=message):
        Timeline.from_json(text, "x.json")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.json"):
        Timeline.load(tmp_path / "nothing.json")
