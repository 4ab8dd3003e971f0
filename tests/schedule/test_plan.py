import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import DataError
from plait.schedule.generators import one_f_one_b
from plait.schedule.pipeline import fused_workload
from plait.schedule.plan import Placement, Plan, PolicyChoice
from plait.schedule.timeline import Span, Timeline

FUSED = one_f_one_b(fused_workload((2, 2), (2, 1), (1, 2)))
PLAN = Plan(
    "mixed",
    4,
    (
        Placement("actor.generate", "decode", (0, 1, 2, 3), dp=4, after="drop"),
        Placement("actor.train", "train", (0, 1, 2, 3), tp=2, pp=2),
        Placement("ref.logprobs", "score", (3,), after="offload"),
    ),
    (FUSED,),
    (PolicyChoice("migration", (("threshold", 96), ("max_batch", 48), ("transfer", "kv"))),),
    Timeline((Span("actor:0F0", "F", 0, 0.0, 1.0),)),
)

plans = st.builds(
    Plan,
    name=st.text(max_size=8),
    num_ranks=st.integers(4, 8),
    placements=st.lists(st.sampled_from(PLAN.placements), unique=True).map(tuple),
    schedules=st.sampled_from([(), (FUSED,)]),
    policies=st.lists(
        st.builds(
            PolicyChoice,
            st.text(max_size=5),
            st.dictionaries(st.text(max_size=4), st.integers() | st.booleans() | st.text(max_size=3), max_size=3).map(
                lambda d: tuple(d.items())
            ),
        ),
        max_size=3,
        unique_by=lambda policy: policy.name,
    ).map(tuple),
    predicted=st.sampled_from([None, PLAN.predicted]),
)


@given(plans)
def test_the_file_reads_back(plan):
    assert Plan.from_json(plan.to_json()) == plan


def test_parts_are_found_by_name(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan == PLAN
    assert plan.placements_of("actor.train", "train") == (PLAN.placements[1],)
    assert plan.placements_of("actor.train", "score") == ()
    assert plan.schedule("1F1B") == FUSED
    assert plan.schedule("other") is None


def test_a_plan_may_be_written_by_hand():
    text = """{"format": "plait-plan", "version": 1, "name": "hand", "num_ranks": 2,
               "placements": [{"call": "actor.train", "mode": "train", "ranks": [0, 1], "pp": 2}]}"""
    plan = Plan.from_json(text)
    assert plan.placements == (Placement("actor.train", "train", (0, 1), pp=2),)
    assert plan.predicted is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_ranks": 2}, r"^p\.json: actor.generate decode: expected different ranks below num_ranks 2"),
        ({"version": 3}, "version 1, found 3"),
        ({"placement": []}, "unknown key 'placement'"),
        ({"format": "x"}, "expected a plan file"),
        ({"placements": [{"call": "a", "mode": "train", "ranks": [0, 1], "tp": 3}]}, "1 x 3 x 1 ranks, found 2"),
        ({"placements": [{"call": "a", "mode": "fly", "ranks": [0]}]}, "expected mode prefill, decode"),
        ({"placements": [{"call": "a", "mode": "train", "ranks": [0], "after": "burn"}]}, "'burn'"),
        ({"placements": [{"call": "a", "mode": "train", "ranks": [0]}] * 2}, "expected one placement 'a train'"),
        ({"placements": [{"mode": "train"}]}, r"placements\[0\]: the key 'call' is missing"),
        ({"placements": [], "num_ranks": 1}, r"^p\.json: schedule '1F1B' needs 2 ranks of 1"),
        ({"schedules": [{}]}, r"^p\.json: expected a schedule file"),
        ({"num_ranks": "2"}, "p.json: expected a whole number for 'num_ranks', found '2'"),
        ({"num_ranks": True}, "expected a whole number for 'num_ranks', found True"),
        ({"name": 5}, "expected a text for 'name', found 5"),
        ({"placements": {"a": 1}}, "expected a list for 'placements'"),
    ],
)
def test_what_contradicts_itself_is_refused(change, message):
    record = {**json.loads(PLAN.to_json()), **change}
    with pytest.raises(DataError, match=message):
        Plan.from_json(json.dumps(record), "p.json")


def test_a_plan_without_a_name_is_refused():
    with pytest.raises(DataError, match=r"p\.json: the key 'name' is missing"):
        Plan.from_json('{"format": "plait-plan", "version": 1, "num_ranks": 2}', "p.json")


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="does not parse"):
        Plan.from_json("{", "p.json")
    with pytest.raises(DataError, match=r"none\.json"):
        Plan.load(tmp_path / "none.json")
