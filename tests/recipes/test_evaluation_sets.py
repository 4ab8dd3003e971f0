"""What a recipe says of the sets that it is measured on, and what it leaves to `evaluation`, `sampling` and `data`."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import ConfigError
from plait.recipes.evaluation_sets import Answering, draws_filtered, evaluation_sets
from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import load_recipe, recipe_of
from plait.recipes.renamed_keys import with_new_names


def of(data: dict[str, Any] | None = None, **evaluation: Any) -> Recipe:
    tree = {"model": "m", "data": {"source": "a.jsonl", **(data or {})}, "sampling": {"max_response_tokens": 32}}
    return recipe_of({**tree, "evaluation": evaluation})


def test_without_sets_there_is_one_that_is_held_out_of_the_data() -> None:
    assert evaluation_sets(of()) == ()
    (one,) = evaluation_sets(of(items=5, temperature=0.5, top_p=0.9))
    assert (one.label, one.section, one.source, one.items) == ("", "evaluation", None, 5)
    assert one.answering == Answering(0.5, 0.9, 0, 0.0, 32, 1, ())


def test_what_a_set_leaves_out_is_as_in_the_sections() -> None:
    sets = ["hf:org/math", {"source": "aime.jsonl", "samples_per_prompt": 32, "pass_at": [1, 32], "temperature": 0.6}]
    data = {"prompt_column": "q", "system_prompt": "Think.", "size": 3, "seed": 4, "prompt_template": "> {question}"}
    first, second = evaluation_sets(of(data, items="all", max_response_tokens=64, top_p=0.95, sets=sets))
    assert first.label == "math"
    assert (second.label, second.section, first.items, second.items) == ("aime", "evaluation.sets.1", None, None)
    assert second.answering == Answering(0.6, 0.95, 0, 0.0, 64, 32, (1, 32))
    assert (first.answering.temperature, first.answering.filters, second.answering.filters) == (0.0, False, True)
    assert second.source is not None
    assert (second.source.prompt_column, second.source.system_prompt, second.source.seed) == ("q", "Think.", 4)
    assert (second.source.prompt_template, second.source.size) == ("> {question}", None)
    own = {"source": "b.jsonl", "prompt_column": "text", "prompt_template": "{question}", "parameters": {}}
    (third,) = evaluation_sets(of(data, items=1, sets=[own]))
    assert third.source is not None
    assert (third.source.prompt_column, third.source.prompt_template) == ("text", "{question}")


def test_sets_without_items_are_not_evaluated() -> None:
    """`--evaluation.items 0` turns off all that do not say their own number."""
    both = of(items=0, sets=["a.jsonl", {"source": "b.jsonl", "items": 3}])
    assert [one.label for one in evaluation_sets(both)] == ["b"]


def test_truncation_in_an_evaluation_alone_counts_where_memory_is() -> None:
    assert not draws_filtered(of(items=1))
    assert draws_filtered(of(items=1, temperature=1.0, top_k=3))


def test_a_command_line_names_one_set_or_several() -> None:
    keys = [("model", "m"), ("data.source", "a.jsonl"), ("evaluation.items", "all")]
    assert [one.source for one in load_recipe(None, [*keys, ("evaluation.sets", "t.jsonl")]).evaluation.sets] == [
        "t.jsonl"
    ]


@pytest.mark.parametrize(
    ("evaluation", "said"),
    [
        ({"items": 1, "sets": ["x/a.jsonl", "y/a.jsonl"]}, "two sets are named `a`; set `name` in one of them"),
        ({"items": "all"}, "items is all, but they are held out of `data`"),
        ({"items": 1, "sets": [{"items": "all"}]}, "`items` is all, but the set is held out of `data`"),
        ({"items": 1, "sets": [{"system_prompt": "x"}]}, "`system_prompt` is set, but without a `source` of its own"),
        (
            {"items": 1, "sets": [{"source": "b", "samples_per_prompt": 2}]},
            "sets.0: samples_per_prompt is 2, but",
        ),
        ({"items": 1, "sets": [{"source": "b", "top_p": 0.9}]}, "sets.0: top_p is 0.9, but at temperature 0 the most"),
        ({"items": 1, "top_k": 4}, "top_k is 4, but at temperature 0 the most probable token is taken"),
        (
            {"items": 1, "sets": [{"source": "b", "pass_at": [4]}]},
            "sets.0: pass_at has 4, but each prompt is",
        ),
        ({"items": 1, "temperature": 0.001}, r"expected 0 \(greedy\) or at least 0.01"),
        ({"items": "some"}, "`evaluation.items`: expected all or a number of items"),
        ({"items": 1, "sets": [{"source": "b", "itms": 1}]}, "unknown key `evaluation.sets.0.itms`"),
    ],
)
def test_what_does_not_fit_is_told(evaluation: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        of(**evaluation)


def test_the_source_of_held_out_rows_has_another_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown key `data.evaluation_source`: it is `evaluation.sets` now"):
        of({"evaluation_source": "b.jsonl"}, items=1)
    with pytest.raises(ConfigError, match=r"`data.more.0.evaluation_source`: it is `evaluation.sets` now"):
        of({"more": [{"source": "c.jsonl", "evaluation_source": "b.jsonl"}]}, items=1)


def test_a_stored_recipe_with_a_source_of_held_out_rows_is_read() -> None:
    """What earlier versions wrote: the key in every source, mostly without a value."""
    data = {"source": "a.jsonl", "evaluation_source": "b.jsonl", "more": []}
    tree = {"model": "m", "data": data, "pretraining": {"source": "p", "evaluation_source": None}}
    recipe = recipe_of(with_new_names({**tree, "evaluation": {"items": 2}}))
    (one,) = evaluation_sets(recipe)
    assert one.source is not None
    assert (one.label, one.source.source, one.items) == ("", "b.jsonl", 2)
    unset = {"source": "a.jsonl", "evaluation_source": None, "more": [{"source": "c", "evaluation_source": None}]}
    assert len(recipe_of(with_new_names({"model": "m", "data": unset})).data.sources) == 2
