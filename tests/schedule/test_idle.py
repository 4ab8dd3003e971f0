"""Where ranks did nothing, and what let them go on: by hand."""

from __future__ import annotations

import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

from plait.schedule.gantt import svg_gantt
from plait.schedule.idle import Wait, waited_s, waits
from plait.schedule.timeline import Span, Timeline


def span(action: str, rank: int, start_s: float, end_s: float, lane: str = "compute") -> Span:
    return Span(action, "SCORE", rank, start_s, end_s, lane=lane, role=action.partition(".")[0])


SCORED = span("reward.score/p1/mb0", 0, 0.0, 5.0)
MEASURED = Timeline(
    (
        SCORED,
        span("ref.logprobs/p0/mb0", 0, 5.0, 9.0),
        span("reward.score/p0/mb0", 1, 0.0, 3.0),
        span("ref.logprobs/p1/mb1", 1, 5.5, 6.0),
        span("actor.weights/1", 1, 6.0, 8.5, lane="link"),
        span("ref.logprobs/p2/mb0", 1, 8.75, 10.0),
    ),
    source="measured",
)


def test_a_rank_waits_for_what_ended_last_before_it_went_on() -> None:
    """Rank 1 is told of a part when rank 0 has ended its own; a link is at work for it later; then nothing ended."""
    assert waits(MEASURED) == [Wait(1, 3.0, 5.5, SCORED), Wait(1, 8.5, 8.75, None)]
    assert str(waits(MEASURED)[0]) == "waits 3 to 5.5 for rank 0: reward.score/p1/mb0"
    assert waits(MEASURED, least_s=1.0) == [Wait(1, 3.0, 5.5, SCORED)]
    assert waits(Timeline(())) == []


def test_of_what_ends_together_the_nearest_rank_counts() -> None:
    spans = [span(f"ref.logprobs/p{rank}", rank, 0.0, 4.0) for rank in (0, 1, 3)]
    late = [span("ref.logprobs/p2", 2, 0.0, 1.0), span("ref.logprobs/p9", 2, 4.0, 5.0)]
    assert waits(Timeline((*spans, *late))) == [Wait(2, 1.0, 4.0, spans[2])]


def test_waits_of_hundreds_of_ranks_are_found_in_no_time() -> None:
    """Of 512 ranks with 60 actions each: to sort all actions for each rank took half a minute."""
    spans = [
        span(f"ref.logprobs/p{number}", rank, number + rank / 1024, number + rank / 1024 + 0.4)
        for rank in range(512)
        for number in range(60)
    ]
    begun = time.process_time()
    found = waits(Timeline(tuple(spans)))
    assert time.process_time() - begun < 5
    assert len(found) == 512 * 60 - 1, "all wait before each of their actions, but the first rank before its first"


def test_seconds_are_added_up_by_whom_they_were_waited_for() -> None:
    assert waited_s(MEASURED) == {1: {(0, "reward.score"): 2.5, None: 0.25}}
    stages = Timeline((Span("actor:0F0", "F", 0, 0.0, 2.0, role="actor"), Span("actor:1F0", "F", 1, 2.0, 3.0)))
    assert waited_s(stages) == {1: {(0, "actor F"): 2.0}}
    assert waited_s(Timeline(())) == {}


def test_a_rank_that_begins_late_waits_from_the_beginning_and_a_disk_is_not_waited_for() -> None:
    late = Timeline((span("a.x", 0, 0.0, 2.5), span("a.x", 1, 3.0, 4.0), span("save", 1, 0.0, 1.0, lane="disk")))
    assert waits(late) == [Wait(1, 0.0, 3.0, late.spans[0])]
    early = Timeline((span("a.x", 0, 0.0, 2.0), *late.spans[1:]))
    assert waits(early) == [Wait(1, 0.0, 3.0, None)], "what ended a second before did not let it go on"


def test_a_measured_picture_says_what_ranks_waited_for_and_which_part_a_box_is() -> None:
    root = ElementTree.fromstring(svg_gantt(MEASURED))
    assert "waits 3 to 5.5 for rank 0: reward.score/p1/mb0" in _titles(MEASURED)
    texts = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "for rank 0: reward.score/p1/mb0" in texts
    assert {"0", "1", "1.1", "2"} <= set(texts), "parts, and the second micro-batch of one"
    assert {"reward.score", "ref.logprobs", "actor.weights"} <= set(texts), "a colour for each call"
    assert not any(title.startswith("waits") for title in _titles(replace(MEASURED, source="predicted")))


def _titles(timeline: Timeline) -> list[str]:
    root = ElementTree.fromstring(svg_gantt(timeline))
    return [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}title")]
