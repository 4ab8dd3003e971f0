import json

import pytest

from plait.errors import DataError
from plait.observe import trace
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


def test_a_long_trace_is_continued_without_parsing_its_actions(tmp_path, monkeypatch):
    """A run of thousands of steps has gigabytes of them: only what names ranks and lanes is read."""
    path, parsed = tmp_path / "trace.json", []
    with TraceWriter(path) as writer:
        writer.append([TraceEvent(f"s{i}", i, i + 1, rank=i % 2, args=(("text", '"ph":"M"'),)) for i in range(100)])
    monkeypatch.setattr(trace, "parse", lambda line: parsed.append(line) or json.loads(line))
    TraceWriter(path, resume=True).close()
    assert len(parsed) == 6, "of each rank its name, its place and its lane"


@pytest.mark.parametrize("torn", [1, 2, 20])
def test_what_a_crash_left_of_a_last_line_is_cut_before_others_follow(tmp_path, torn):
    path = tmp_path / "trace.json"
    with TraceWriter(path) as writer:
        writer.append([TraceEvent("first", 0, 1), TraceEvent("second", 1, 2)])
    path.write_bytes(path.read_bytes()[:-torn])
    with TraceWriter(path, resume=True) as writer:
        writer.append([TraceEvent("second", 1, 2)])
        assert writer.offset == path.stat().st_size
    assert [box["name"] for box in boxes(path)] == ["first", "second"]


def test_a_trace_of_which_a_crash_left_half_a_first_line_is_begun_anew(tmp_path):
    (tmp_path / "trace.json").write_text("[")
    with TraceWriter(tmp_path / "trace.json", resume=True) as writer:
        writer.append([TraceEvent("first", 0, 1)])
    assert [box["name"] for box in boxes(tmp_path / "trace.json")] == ["first"]


def test_a_line_that_is_no_event_is_said(tmp_path):
    path = tmp_path / "trace.json"
    with TraceWriter(path) as writer:
        writer.append([TraceEvent("first", 0, 1)])
    sound = path.read_text()
    for damaged in (sound.replace("[\n", "{\n"), sound + "{nonsense\n", sound.replace('{"name":"rank 0"}', "7 7")):
        path.write_text(damaged)
        with pytest.raises(DataError, match=r"trace\.json:\d is damaged: "):
            TraceWriter(path, resume=True)


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
