"""The keys of a rendezvous: they answer as torch's own store does, and who waits is told when the last key is there."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.launch.keys import Add, Append, Check, CompareSet, Count, Delete, Get, GiveUp, Keys, Set

NAME = st.sampled_from(["a", "b"])
VALUE = st.sampled_from([b"", b"1", b"-7", b"x"])
CALL = st.one_of(
    st.tuples(st.just("set"), NAME, VALUE),
    st.tuples(st.just("append"), NAME, VALUE),
    st.tuples(st.just("compare_set"), NAME, VALUE, VALUE),
    st.tuples(st.just("delete_key"), NAME),
    st.tuples(st.just("check"), st.lists(NAME, min_size=1)),
    st.tuples(st.just("num_keys")),
)


@settings(max_examples=200, deadline=None)
@given(calls=st.lists(CALL, max_size=12))
def test_every_call_answers_as_torchs_store_in_memory(calls):
    import torch.distributed as dist

    from plait.launch.store import ControllersStore

    keys = Keys()
    ours = ControllersStore(lambda question, seconds: keys.ask(0, 0, question)[0][2])
    theirs = dist.HashStore()
    for name, *arguments in calls:
        assert getattr(ours, name)(*arguments) == getattr(theirs, name)(*arguments)
    for key in ("a", "b"):
        if theirs.check([key]):
            assert ours.get(key) == theirs.get(key)


def test_a_sum_of_four_and_minus_six_is_minus_two_and_stands_in_digits():
    keys = Keys()
    assert keys.ask(0, 0, Add("n", 4)) == [(0, 0, (b"4",))]
    assert keys.ask(1, 0, Add("n", -6)) == [(1, 0, (b"-2",))]
    assert keys.ask(0, 1, Get(("n",))) == [(0, 1, (b"-2",))]


def test_who_waits_for_two_keys_is_told_both_when_the_second_is_set():
    keys = Keys()
    assert keys.ask(1, 7, Get(("a", "b"))) == []
    assert keys.ask(0, 0, Set((("b", b"2"),))) == [(0, 0, ())]
    assert keys.ask(2, 3, Append("a", b"1")) == [(2, 3, ()), (1, 7, (b"1", b"2"))]
    assert keys.ask(0, 1, Set((("a", b"9"),))) == [(0, 1, ())], "told once"


def test_who_gave_up_is_told_nothing():
    keys = Keys()
    assert keys.ask(1, 7, Get(("a",))) == []
    assert keys.ask(1, 8, GiveUp(7)) == []
    assert keys.ask(0, 0, Set((("a", b"1"),))) == [(0, 0, ())]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (Check(("a", "b")), b""),
        (Check(("a",)), b"1"),
        (Delete("b"), b""),
        (Count(), b"1"),
        (CompareSet("b", b"old", b"new"), b"old"),
        (CompareSet("b", b"", b"new"), b"new"),
    ],
)
def test_of_one_key_that_is_there(question, answer):
    keys = Keys()
    keys.ask(0, 0, Set((("a", b"1"),)))
    assert keys.ask(0, 1, question) == [(0, 1, (answer,))]
