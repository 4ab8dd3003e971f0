import json

import pytest

from plait.observe.trace import TraceCounter, TraceEvent, TraceWriter, read_trace, write_trace


def boxes(path):
    return [event for event in read_trace(path) if event["ph"] == "X"]


def test_a_whole_trace_is_strict_json_in_microseconds(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(path, [TraceEvent("actor:0F0", 1.0, 1.5, rank=3, lane="compute", args=(("tokens", 7),))])
    events = json.loads(path.read_text())
    (box,) = [event for event in events if event["ph"] == "X"]
    assert (box["ts"], box["dur"], box["pid"], box["args"]) == (1e6, 0.5e6, 3, {"tokens": 7})
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {"compute"}


def test_an_empty_trace_is_an_empty_array(tmp_path):
    write_trace(tmp_path / "t.json", [])
    assert json.loads((tmp_path / "t.json").read_text()) == []


def test_an_open_trace_cut_at_any_offset_stays_loadable_and_is_continued(tmp_path):
    path = tmp_path / "trace.json"
    offsets = []
    with TraceWriter(path) as writer:
        for step in range(4):
            writer.append([TraceEvent(f"s{step}", step, step + 1, rank=0, lane=f"lane {step % 2}")])
            offsets.append(writer.offset)
    for kept, offset in enumerate(offsets, start=1):
        copy = tmp_path / f"cut{kept}.json"
        copy.write_bytes(path.read_bytes()[:offset])
        assert [box["name"] for box in boxes(copy)] == [f"s{i}" for i in range(kept)]

    cut = tmp_path / "cut2.json"
    with TraceWriter(cut, resume=True) as writer:
        writer.append(
            [
                TraceEvent("again", 9, 10, rank=0, lane="lane 1"),
                TraceEvent("new", 9, 10, rank=0, lane="lane 2"),
            ]
        )
    rows = {box["name"]: box["tid"] for box in boxes(cut)}
    assert rows["again"] == rows["s1"]
    assert len({rows["s0"], rows["s1"], rows["new"]}) == 3
    assert sum(event["name"] == "process_name" for event in read_trace(cut)) == 1


def test_a_line_that_a_crash_cut_short_is_dropped(tmp_path):
    path = tmp_path / "trace.json"
    with TraceWriter(path) as writer:
        writer.append([TraceEvent("first", 0, 1, args=(("a", "}"),)), TraceEvent("second", 1, 2)])
    whole = path.read_text()
    path.write_text(whole[: whole.index('"second"') + 3])
    assert [box["name"] for box in boxes(path)] == ["first"]


def test_counters_carry_their_value(tmp_path):
    write_trace(tmp_path / "t.json", [TraceCounter("memory held", 0.25, 12.0, rank=1)])
    (counter,) = [event for event in read_trace(tmp_path / "t.json") if event["ph"] == "C"]
    assert (counter["ts"], counter["pid"], counter["args"]) == (0.25e6, 1, {"memory held": 12.0})


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    (tmp_path / "t.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="Chrome trace"):
        read_trace(tmp_path / "t.json")
