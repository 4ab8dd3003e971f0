"""Numbers of the data that a flow reads: which rows have them."""

from __future__ import annotations

from typing import Any

import pytest

from plait.data.formats import Row
from plait.data.numbers import check_numbers, names_asked, number_of
from plait.data.records import Prompt
from plait.dataflow import CallKind, Dataflow, trace
from plait.errors import DataError, FlowError, NoAttribute


def loss(batch: Any, weights: Any) -> Any: ...


def flow(prompts: Any, labelled: Any, actor: Any) -> None:
    samples = actor.generate(prompts)
    assert samples.data("weight").column == samples.data("weight").column, "one column, however often it is asked for"
    actor.train(samples, loss=loss, weights=samples.data("weight"))
    actor.train(labelled.mismatched, loss=loss, weights=labelled.mismatched.data("cost"))
    actor.train(labelled, loss=loss, weights=labelled.data("label"))


def traced() -> Dataflow:
    return trace(flow, roles=("actor",))


def test_a_flow_asks_for_numbers_by_the_names_of_columns() -> None:
    assert names_asked(traced().of_kind(CallKind.GENERATE)) == ("weight",)
    assert sorted(names_asked(traced().of_kind(CallKind.READ))) == ["cost", "label"]
    (rollout,) = traced().of_kind(CallKind.GENERATE)
    prompt = Prompt(0, "a", (1,), {"prompt": "a", "weight": 3, "label": True})
    assert number_of(prompt, rollout.outputs[-1]) == 3.0


@pytest.mark.parametrize("name", ["", 3, None])
def test_what_is_no_name_is_refused(name: Any) -> None:
    def wrong(prompts: Any, actor: Any) -> None:
        actor.train(actor.generate(prompts), loss=loss, weights=actor.generate(prompts).data(name))

    with pytest.raises(FlowError, match="takes the name of a column of the data, not"):
        trace(wrong, roles=("actor",))


def test_an_attribute_that_is_none_is_answered_with_how_data_are_read() -> None:
    def wrong(prompts: Any, actor: Any) -> None:
        samples = actor.generate(prompts)
        assert not hasattr(samples, "difficulty")
        samples.difficulty  # noqa: B018

    with pytest.raises((FlowError, NoAttribute), match=r'a number of the data is `samples\.data\("difficulty"\)`'):
        trace(wrong, roles=("actor",))


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"weight": 1}, ""),
        ({"weight": -0.5}, ""),
        ({"weight": True}, ""),
        (
            {"wieght": 1},
            r"found no column of that name \(did you mean `wieght`\?\); give every row one$",
        ),
        ({"weight": None}, "found null"),
        ({"weight": "1"}, "found '1'"),
        ({"weight": [1]}, r"found \[1\]"),
        ({"weight": float("nan")}, "found one that is not finite"),
        ({"weight": float("-inf")}, "found one that is not finite"),
        ({"weight": 10**400}, "found one that is not finite"),
    ],
)
def test_every_row_has_to_have_one(columns: dict[str, Any], said: str) -> None:
    rows = [Row({"prompt": "a", "weight": 0}, "x.jsonl:1"), Row({"prompt": "b", **columns}, "x.jsonl:2")]
    check_numbers(rows, ())
    if not said:
        check_numbers(rows, ("weight",))
        return
    with pytest.raises(DataError, match=rf"^x\.jsonl:2: the flow reads a number in the column `weight`, {said}"):
        check_numbers(rows, ("weight",))
