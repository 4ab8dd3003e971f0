import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import DataError
from plait.schedule.action import Action, Kind, format_ids, parse_action, parse_ids

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,8}", fullmatch=True)
numbers = st.integers(0, 10**6)
actions = st.builds(
    Action,
    kind=st.sampled_from(Kind),
    model=names | st.just(""),
    copy=st.integers(0, 40),
    stage=st.integers(0, 40),
    index=st.none() | numbers,
    round=st.none() | numbers,
    rank=st.integers(0, 63),
    samples=st.lists(numbers, max_size=6).map(tuple),
    waits=st.lists(st.sampled_from(["actor:0F0", "1B3", "critic/2:0DECODE3.17", "0STEP"]), max_size=3).map(tuple),
    bytes=st.integers(0, 2**50),
)


@given(actions)
def test_the_text_reads_back(action):
    assert parse_action(action.text(), action.rank) == action


def test_texts_of_the_kinds_of_action():
    assert Action(Kind.FORWARD, stage=2, index=0).id == "2F0"
    assert Action(Kind.BACKWARD, "critic", 1, 0, 15).id == "critic/1:0B15"
    assert Action(Kind.DECODE, "actor", 0, 2, 3, 17).id == "actor:2DECODE3.17"
    assert Action(Kind.STEP, "actor").id == "actor:0STEP"
    full = Action(Kind.FORWARD, "actor", stage=1, index=0, samples=(0, 1, 2, 3, 8), waits=("actor:0F0",), bytes=4096)
    assert full.text() == "actor:1F0{0-3,8}<actor:0F0#4096"
    assert full.text(waits=False) == "actor:1F0{0-3,8}#4096"
    assert Action(Kind.SEND_FORWARD).kind.lane == "send"


@given(st.lists(st.integers(0, 50), min_size=1))
def test_sample_sets_keep_their_order(ids):
    assert parse_ids(format_ids(ids)) == tuple(ids)


@pytest.mark.parametrize("text", ["", "F0", "2X0", "actor2F0", "2F0 ", "2F0{a}", "2F0#x", "actor/:2F0", "2F-1"])
def test_other_text_is_refused(text):
    with pytest.raises(DataError, match="expected an action"):
        parse_action(text)


def test_an_id_has_one_spelling():
    with pytest.raises(DataError, match="shortest form, 2F3"):
        parse_action("02F03")
    with pytest.raises(DataError, match="sample ids"):
        parse_ids("1-x")
