"""Several sources in one run: whose turn it is, what is held out, what a recipe says of them."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.data.mixture import BLOCK, Mixed, Stream, Turns
from plait.data.prompts import PromptEncoder, PromptSet
from plait.data.settings import DataSettings
from plait.data.several_sources import open_sources
from plait.errors import ConfigError, DataError
from plait.recipes.recipe_file import load_recipe
from tests.data.json_rows import written
from tests.data.test_prompts import keys, one_prompt, source
from tests.models.tiny import tiny_tokenizer


def sources_of(turns: Turns, start: int, count: int) -> str:
    return "".join("abc"[one] for one, _ in turns.take(start, count))


def test_turns_by_hand():
    """Weights 2 and 1 with offsets 0.5 and 0.25: a comes at times 0.25, 0.75, 1.25, …, b at 0.25, 1.25, …; of a tie the
    first."""
    turns = Turns((2, 1), 0)
    turns._offsets = (0.5, 0.25)
    assert turns.take(0, 6) == [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3)]
    assert turns.counts(6) == [4, 2]
    assert turns.take(4, 2) == [(1, 1), (0, 3)]


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
    st.integers(0, 3),
    st.integers(0, 3 * BLOCK),
    st.integers(0, 20),
)
def test_a_turn_depends_on_seed_and_place_alone(weights, seed, start, count):
    """Whatever was asked before; and every source's instances are 0, 1, 2, … without a gap."""
    fresh, used = Turns(weights, seed), Turns(weights, seed)
    straight = used.take(0, start + count)
    assert fresh.take(start, count) == straight[start:]
    for place in range(len(weights)):
        own = [n for one, n in straight if one == place]
        assert own == list(range(len(own)))
        assert abs(len(own) - (start + count) * weights[place] / sum(weights)) <= len(weights)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=4), st.integers(0, 5), st.integers(0, 3))
def test_without_weights_every_row_comes_once_in_an_epoch(sizes, seed, epoch):
    turns, total = Turns([float(n) for n in sizes], seed), sum(sizes)
    assert turns.counts((epoch + 1) * total) == [(epoch + 1) * n for n in sizes]


def mixed(*sizes: int, weights: tuple[float, ...], shuffle: bool = True) -> Mixed[PromptSet]:
    sets = []
    for place, rows in enumerate(sizes):
        made = source(*(f"{'abc'[place]}{n}" for n in range(rows)))
        encoder = PromptEncoder(tiny_tokenizer(), keys(), conversational=False)
        sets.append(PromptSet(made, encoder, tuple(range(rows)), (9 + place,) * rows, place))
    names = tuple("abc"[: len(sizes)])
    return Mixed(tuple(sets), names, weights, (shuffle,) * len(sizes))


def test_a_stream_of_two_sources_by_hand():
    two = mixed(3, 2, weights=(1.0, 1.0), shuffle=False)
    stream = Stream(two, one_prompt, seed=0)
    run = [prompt.columns["prompt"] for prompt in stream.take(0, 12)]
    assert [prompt for prompt in run if prompt[0] == "a"] == ["a0", "a1", "a2", "a0", "a1", "a2"]
    assert [prompt for prompt in run if prompt[0] == "b"] == ["b0", "b1", "b0", "b1", "b0", "b1"]
    assert [prompt.uid for prompt in stream.take(8, 4)] == [8, 9, 10, 11]
    assert (len(two), two.longest_tokens, two.num_dropped) == (5, 10, 1)
    assert stream.passes(12) == {"a": 2.0, "b": 3.0}
    assert Stream(two, one_prompt, seed=0).take(8, 4) == stream.take(8, 4)


def test_each_source_has_an_order_of_its_own():
    """Two of one size: each a permutation in each epoch, and not the same one. The first is that of a run alone."""
    two = mixed(30, 30, weights=(1.0, 1.0))
    run = Stream(two, one_prompt, seed=5).take(0, 60)
    orders = [[p.columns["prompt"][1:] for p in run if p.columns["prompt"][0] == name] for name in "ab"]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]
    alone = Stream(mixed(30, weights=(1.0,)), one_prompt, seed=5).take(0, 30)
    assert [p.columns["prompt"][1:] for p in alone] == orders[0]


def test_no_question_that_one_source_holds_out_is_trained_on_from_another(tmp_path):
    """Both have all questions; what either holds out, neither trains on. Columns are those of both."""
    one = written(tmp_path / "one.jsonl", [{"prompt": f"q{n}", "answer": str(n)} for n in range(20)])
    two = written(tmp_path / "two.jsonl", [{"prompt": f"q{n}", "hint": "h"} for n in range(15)])
    found = open_sources(DataSettings(source=one, more=(DataSettings(source=two, seed=1),)), 4)
    held = [{row.question for row in splits.evaluation.rows} for splits in found]
    assert [len(questions) for questions in held] == [4, 4]
    assert held[0] != held[1]
    for splits, size in zip(found, (20, 15), strict=True):
        trained = {row.question for row in splits.train.rows}
        assert trained == {f"q{n}" for n in range(size)} - held[0] - held[1]
        assert splits.num_removed == size - len(trained)
        assert splits.train.columns == ("prompt", "answer", "hint")
    assert found[1].train[0].columns["answer"] is None
    assert [splits.train.label for splits in found] == ["one", "two"]


def test_a_source_is_named_where_it_is_at_fault(tmp_path):
    one = written(tmp_path / "one.jsonl", [{"prompt": "a"}])
    with pytest.raises(DataError, match=r"^source `missing`: "):
        open_sources(DataSettings(source=one, more=(DataSettings(source=str(tmp_path / "missing.jsonl")),)))


def test_data_as_a_list(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: m\ndata:\n  - {source: a/sums.jsonl, weight: 3}\n  - {source: 'reasoning_gym:chain_sum', weight: 1}\n"
        "  - {source: b.parquet, weight: 0.5, name: words, prompt_template: 'Q {question}'}\n"
    )
    data = load_recipe(path, [("data.seed", 4)]).data
    assert [one.label for one in data.sources] == ["sums", "chain_sum", "words"]
    assert [one.weight for one in data.sources] == [3, 1, 0.5]
    assert [one.seed for one in data.sources] == [4, 0, 0]
    assert data.task is None
    assert load_recipe(path).model_validate(load_recipe(path).model_dump(mode="json")).data.sources[2].label == "words"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[{source: a.jsonl, weight: 3}, {source: b.jsonl}]", "some sources have a `weight` and others none"),
        ("[{source: x/a.jsonl}, {source: y/a.jsonl}]", "two sources are named `a`; set `name` in one of them"),
        ("[{source: a.jsonl}, {source: b.jsonl, more: [{source: c.jsonl}]}]", "has no `more` of its own"),
        ("[{source: a.jsonl}, {source: b.jsonl, wieght: 2}]", r"unknown key `data\.more\.0\.wieght`"),
        ("[{source: a.jsonl}, {source: b.jsonl, weight: 0}]", r"key `data\.more\.0\.weight`: .*greater than 0"),
        ("[{source: a.jsonl}, {source: b.jsonl, name: 'a/b'}]", r"key `data\.more\.0\.name`: .*pattern"),
        ("[a.jsonl, b.jsonl]", r"`data` is a section .*`data\.source`, found .*; several are a list of sections"),
        (
            "{source: [a.jsonl, b.jsonl]}",
            r"key `data\.source`: expected one source, found \['a.*; several are a list of",
        ),
    ],
)
def test_mistakes_in_a_list_are_named(tmp_path, text, says):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: m\ndata: {text}\n")
    with pytest.raises(ConfigError, match=says):
        load_recipe(path)


def test_shares_are_those_of_the_weights():
    turns = Turns((3, 1, 0.5), 7)
    assert list(accumulate(turns.counts(900))) == [600, 800, 900]


def test_a_data_set_in_shards_is_named_in_short():
    first, *more = (DataSettings(source=f"rows-{at:03}.jsonl") for at in range(200))
    assert first.model_copy(update={"more": tuple(more)}).title == (
        "rows-000.jsonl, rows-001.jsonl, rows-002.jsonl and 197 more"
    )
    assert first.model_copy(update={"more": tuple(more[:3])}).title.endswith("rows-002.jsonl, rows-003.jsonl")
