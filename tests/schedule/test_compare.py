import pytest

from plait.schedule.compare import Busy, compare, compare_calls, whole_side
from plait.schedule.gantt import ascii_gantt, letter_of, svg_gantt, svg_gantts
from plait.schedule.generators import one_f_one_b
from plait.schedule.pipeline import fused_workload
from plait.schedule.timeline import Span, Timeline
from plait.simulator.static import simulate


def timeline(*rows):
    return Timeline(tuple(Span(action, action[1], 0, start, end, step=1) for action, start, end in rows))


def test_errors_per_kind_by_hand():
    """F is predicted at 2 s and 4 s and measured at 3 s and 4 s: errors of 50 % and 0, 25 % in the mean."""
    done = compare(
        timeline(("0F0", 0, 2), ("0F1", 2, 6), ("0B0", 6, 7)), timeline(("0F0", 0, 3), ("0F1", 3, 7), ("0B0", 8, 10))
    )
    assert [(k.kind, k.count, k.seconds_a, k.seconds_b, k.mean_error) for k in done.kinds] == [
        ("B", 1, 1, 2, 1.0),
        ("F", 2, 6, 7, 0.25),
    ]
    assert done.same_rows
    assert (done.makespan_a, done.makespan_b) == (7, 10)


def test_rows_of_one_side_and_other_orders_are_found():
    a = timeline(("0F0", 0, 1), ("0F1", 1, 2), ("0F2", 2, 3))
    b = timeline(("0F1", 0, 1), ("0F0", 1, 2), ("0F3", 2, 3))
    done = compare(a, b)
    assert done.only_a == ((1, 0, "0F2"),)
    assert done.only_b == ((1, 0, "0F3"),)
    assert done.reordered == ((0, "compute", "0F0", "0F1"),)
    assert not done.same_rows


def test_an_action_that_occurs_twice_is_matched_in_order():
    twice = timeline(("0F0", 0, 1), ("0F0", 1, 3))
    assert compare(twice, twice).same_rows
    once = timeline(("0F0", 0, 1))
    assert compare(twice, once).only_a == ((1, 0, "0F0"),)


def test_a_chart_by_hand():
    workload = fused_workload((2,), (2,), (1,), models=("actor",))
    chart = ascii_gantt(simulate(one_f_one_b(workload), workload.duration_s()))
    assert chart.splitlines()[:2] == ["rank 0 |aa..AA.AA|", "rank 1 |.aAAaAA..|"]


def test_a_long_timeline_is_scaled_and_an_empty_one_said():
    long = timeline(("0F0", 0, 500), ("0B0", 750, 1000))
    assert ascii_gantt(long, width=8).splitlines()[0] == "rank 0 |ffff..bb|".replace("b", "B")
    assert ascii_gantt(Timeline(())) == "(nothing)\n"


def test_no_two_kinds_of_actions_of_a_step_share_a_letter():
    kinds = ("PREFILL", "DECODE", "SCORE", "TRAIN", "STEP", "SAMPLES", "MOVE", "OFFLOAD", "ONLOAD")
    assert len({letter_of(kind) for kind in kinds}) == len(kinds)


def test_a_picture_has_a_box_for_every_action():
    import xml.etree.ElementTree as ElementTree

    workload = fused_workload((2, 2), (3, 2), (1, 2), models=("actor", "critic"))
    picture = simulate(one_f_one_b(workload), workload.duration_s())
    root = ElementTree.fromstring(svg_gantt(picture, "a < b"))
    titles = [node.text.split()[0] for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sorted(titles) == sorted(span.action for span in picture.spans)
    assert "a < b" in [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    ElementTree.fromstring(svg_gantt(Timeline(())))


def test_two_timelines_are_drawn_on_one_scale():
    """The longer one fills the width; half as long is half as wide."""
    import xml.etree.ElementTree as ElementTree

    short, long = timeline(("0F0", 0, 5)), timeline(("0F0", 0, 10))
    root = ElementTree.fromstring(svg_gantts([("short", short), ("long", long)], width=1084))
    grounds = [node for node in root.iter("{http://www.w3.org/2000/svg}rect") if node.get("fill") == "#eeeeee"]
    assert [node.get("width") for node in grounds] == ["500.0", "1000.0"]


def predicted_and_measured():
    """Two predicted steps of 6 s: generation 3 s on ranks 0 and 1, a move 1, training 2, of which a quarter is the
    optimizer. Three measured ones of 8 s, each with generation of 2 + 2 s on rank 0 and of 3 on rank 1."""
    predicted = [
        Span(action, kind, rank, at + 6 * step, end + 6 * step, step=step + 1, lane=lane)
        for step in range(2)
        for action, kind, rank, at, end, lane in (
            ("actor.generate", "DECODE", 0, 0.0, 3.0, "compute"),
            ("actor.generate", "DECODE", 1, 0.0, 3.0, "compute"),
            ("actor.weights", "MOVE", 1, 3.0, 4.0, "link"),
            ("actor.train", "TRAIN", 0, 4.0, 5.5, "compute"),
            ("actor.train/step", "STEP", 0, 5.5, 6.0, "compute"),
        )
    ]
    measured = [
        Span(action, kind, rank, at + 9 * step, end + 9 * step, step=step + 1, lane=lane)
        for step in range(3)
        for action, kind, rank, at, end, lane in (
            ("actor.generate/prefill", "PREFILL", 0, 0.0, 2.0, "compute"),
            ("actor.generate/decode", "DECODE", 0, 2.0, 4.0, "compute"),
            ("actor.generate/decode", "DECODE", 1, 0.0, 3.0, "compute"),
            ("actor.weights/0", "VIEW", 1, 4.0, 4.25, "link"),
            ("actor.weights/1", "RECV", 1, 4.25, 4.5, "link"),
            ("advantages", "COMPUTE", 0, 4.5, 5.0, "compute"),
            ("actor.train/b0/mb0", "TRAIN", 0, 5.0, 7.0, "compute"),
            ("actor.train/b0/step", "STEP", 0, 7.0, 8.0, "compute"),
            ("checkpoint/0", "WRITE", 0, 8.0, 8.5, "disk"),
        )
    ]
    return Timeline(tuple(predicted)), Timeline(tuple(measured), source="measured")


def test_a_prediction_beside_its_run_by_hand():
    a, b = predicted_and_measured()
    assert (whole_side(a, b), whole_side(b, a), whole_side(a, a), whole_side(b, b)) == ("a", "b", None, None)
    done = compare_calls(a, b, "a")
    assert (done.step_a, done.step_b) == (6.0, 8.0)
    assert done.calls == (
        Busy("actor.generate", 0, 3.0, 4.0),
        Busy("actor.generate", 1, 3.0, 3.0),
        Busy("actor.weights", 1, 1.0, 0.5),
        Busy("actor.train", 0, 2.0, 3.0),
        Busy("advantages", 0, None, 0.5),
    )
    assert done.kinds == (
        Busy("DECODE", None, 6.0, 7.0),
        Busy("MOVE", None, 1.0, 0.5),
        Busy("TRAIN", None, 1.5, 2.0),
        Busy("STEP", None, 0.5, 1.0),
        Busy("COMPUTE", None, None, 0.5),
    )
    assert [call.error for call in done.calls] == pytest.approx([1 / 3, 0.0, -0.5, 0.5, None])
    assert done.same_calls


def test_a_call_that_was_not_run_where_it_was_predicted_is_found():
    a, b = predicted_and_measured()
    elsewhere = Timeline(tuple(span for span in b.spans if span.rank == 0), source="measured")
    done = compare_calls(elsewhere, a, "b")
    assert not done.same_calls
    assert [(call.name, call.rank) for call in done.calls if call.seconds_a is None] == [
        ("actor.generate", 1), ("actor.weights", 1),
    ]  # fmt: skip
