"""`data.rows`: a function of the user's between the rows of a file and what is read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from plait.data.formats import RowKind
from plait.data.made_rows import RowMaker
from plait.data.settings import DataSettings
from plait.data.several_sources import open_sources
from plait.data.sources import open_held_out, open_splits, read_rows
from plait.errors import ConfigError, DataError
from plait.recipes.flow_checks import checked_flow
from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import load_recipe, recipe_of
from plait.recipes.trust import check_origin, code_of, user_recipe
from plait.runtime.inputs.opened_rows import open_rows
from tests.data.json_rows import written

ALPACA = [
    {"instruction": "add", "input": "1 2", "output": "3"},
    {"instruction": "greet", "input": "", "output": "hello"},
    {"instruction": "be still", "input": "", "output": " "},
]
FILE = """
def alpaca(row):
    if not row["output"].strip():
        return None
    return {"prompt": (row["instruction"] + " " + row["input"]).strip(), "completion": row["output"]}
"""


def alpaca(row: dict[str, Any]) -> dict[str, Any] | None:
    if not row["output"].strip():
        return None
    return {"prompt": f"{row['instruction']} {row['input']}".strip(), "completion": row["output"]}


def made(folder: Path, function: Any, *rows: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(place behind the file, columns) of what is read."""
    name = written(folder / "rows.jsonl", rows)
    read = read_rows(name, RowKind.EXAMPLES, maker=RowMaker(function, "f.py:f"))
    return [(row.place.rpartition("/")[2], row.columns) for row in read]


def test_other_columns_become_those_that_are_read_and_rows_are_left_out(tmp_path: Path) -> None:
    assert made(tmp_path, alpaca, *ALPACA) == [
        ("rows.jsonl:1", {"prompt": "add 1 2", "completion": "3"}),
        ("rows.jsonl:2", {"prompt": "greet", "completion": "hello"}),
    ]


def test_a_row_may_become_several_each_with_its_place(tmp_path: Path) -> None:
    each = lambda row: [{"text": word} for word in row["words"]]
    assert made(tmp_path, each, {"words": ["a b", "c d"]}, {"words": []}, {"words": ("e f",)}) == [
        ("rows.jsonl:1[0]", {"text": "a b"}),
        ("rows.jsonl:1[1]", {"text": "c d"}),
        ("rows.jsonl:3[0]", {"text": "e f"}),
    ]


def test_what_is_drawn_is_of_the_row_alone(tmp_path: Path) -> None:
    def drawn(row: dict[str, Any]) -> dict[str, Any]:
        return {"text": f"a {random.random()}"}

    random.seed(5)
    first = made(tmp_path, drawn, {}, {})
    after = random.random()
    random.seed(7)
    assert made(tmp_path, drawn, {}, {}) == first
    assert len({columns["text"] for _, columns in first}) == 2
    random.seed(5)
    assert random.random() == after, "what the run draws is as it would be without"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda row: row["absent"], ["rows.jsonl:1: `data.rows` (f.py:f): ", "KeyError", "absent"]),
        (lambda row: "a text", ["rows.jsonl:1: `data.rows` (f.py:f) is to give a row", "found a text: 'a text'"]),
        (lambda row: [row, 7], ["rows.jsonl:1[1]: `data.rows`", "found a number: 7"]),
        (lambda row: {1: "a"}, ["rows.jsonl:1: `data.rows`", "a dict of columns"]),
        (lambda row: {"text": "a b", "x": object()}, ["rows.jsonl:1: column `x` holds object"]),
        (lambda row: {"txt": "a b"}, ["rows.jsonl:1: examples need the columns", "by `data.rows`"]),
        (lambda row: None, ["holds no row of which `data.rows` makes one"]),
    ],
)
def test_what_is_wrong_names_the_file_and_the_row(tmp_path: Path, function: Any, said: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        made(tmp_path, function, {"text": "a b"})
    for words in said:
        assert words in str(caught.value)


def test_rows_of_training_and_of_evaluation_go_through_it_source_by_source(tmp_path: Path) -> None:
    one = written(tmp_path / "one.jsonl", ALPACA)
    held = written(tmp_path / "held.jsonl", [*ALPACA[1:], {"instruction": "sing", "input": "", "output": "la"}])
    two = written(tmp_path / "two.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}])
    asked: list[str] = []

    def find(path: str) -> Any:
        asked.append(path)
        return alpaca

    items = open_held_out(DataSettings(source=held, rows="a.py:alpaca"), None, RowKind.EXAMPLES, find)
    assert {row.prompt for row in items.rows} == {"greet", "sing"}
    elsewhere = [row.question for row in items.rows]
    splits = open_splits(DataSettings(source=one, rows="a.py:alpaca"), 0, RowKind.EXAMPLES, elsewhere, find)
    assert [row.prompt for row in splits.train.rows] == ["add 1 2"], "what is held out is not trained on"
    several = DataSettings(source=one, rows="a.py:alpaca", more=(DataSettings(source=two),))
    found = open_sources(several, 0, RowKind.EXAMPLES, find=find)
    assert [[row.prompt for row in one.train.rows] for one in found] == [["add 1 2", "greet"], ["a", "c"]]
    assert asked == ["a.py:alpaca"] * 3
    with pytest.raises(
        DataError, match=r"`data\.rows` is for files and data sets, but `data\.source` is `reasoning_gym"
    ):
        open_splits(DataSettings(source="reasoning_gym:chain_sum", rows="a.py:alpaca"))


def test_a_recipe_names_the_file_which_is_code_of_the_user(tmp_path: Path) -> None:
    rows, file = written(tmp_path / "rows.jsonl", ALPACA), tmp_path / "alpaca.py"
    file.write_text(FILE)
    keys = {"model": "m", "algorithm": "sft", "steps": 1, "data": {"source": rows, "rows": f"{file}:alpaca"}}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(keys))
    recipe = load_recipe(path)
    flow = checked_flow(recipe)
    opened = open_rows(flow, recipe)
    (splits,) = opened.given["examples"]
    assert [row.prompt for row in splits.train.rows] == ["add 1 2", "greet"]
    assert code_of(recipe) == {"data.rows": (f"{file}:alpaca",)}
    with pytest.raises(ConfigError, match=r"`data\.rows`: .*has no `alpacas`; did you mean `alpaca`"):
        open_rows(flow, load_recipe(path, [("data.rows", f"{file}:alpacas")]))


def test_each_evaluation_set_says_what_makes_its_rows(tmp_path: Path) -> None:
    """By default what makes those of the data, if it has a file of its own."""
    (tmp_path / "f.py").write_text(
        f"{FILE}\ndef sung(row):\n    return {{'prompt': 'la', 'completion': row['sung']}}\n"
    )
    data = {"source": written(tmp_path / "rows.jsonl", ALPACA), "rows": f"{tmp_path}/f.py:alpaca"}
    same = {"source": written(tmp_path / "same.jsonl", ALPACA[1:])}
    other = {"source": written(tmp_path / "other.jsonl", [{"sung": "so"}]), "rows": f"{tmp_path}/f.py:sung"}
    plain = {"source": written(tmp_path / "plain.jsonl", [{"prompt": "a", "completion": "b"}]), "rows": "none"}

    def recipe(*sets: dict[str, Any]) -> Recipe:
        tree = {"model": "m", "algorithm": "sft", "steps": 1, "data": data}
        return recipe_of({**tree, "evaluation": {"items": "all", "sets": sets}})

    whole = recipe(same, other, plain)
    opened = open_rows(checked_flow(whole), whole)
    found = {one.of.label: [row.columns for _, source in one.parts for row in source.rows] for one in opened.held_out}
    assert found == {
        "same": [{"prompt": "greet", "completion": "hello"}],
        "other": [{"prompt": "la", "completion": "so"}],
        "plain": [{"prompt": "a", "completion": "b"}],
    }
    assert code_of(whole) == {"data.rows": (data["rows"],), "evaluation.sets.rows": (other["rows"],)}
    wrong = recipe(same, {**other, "rows": f"{tmp_path}/f.py:song"})
    with pytest.raises(ConfigError, match=r"`evaluation\.sets\.1\.rows`: .*has no `song`"):
        open_rows(checked_flow(wrong), wrong)
    failing = recipe(same, {**other, "rows": data["rows"]})
    with pytest.raises(
        DataError, match=r"set `other`: .*other\.jsonl:1: `evaluation\.sets\.1\.rows` .*KeyError"
    ) as caught:
        open_rows(checked_flow(failing), failing)
    assert 'if not row["output"].strip()' in caught.value.frames, "the user's own line is shown"
    assert code_of(recipe({**same, "rows": "none"})) == {"data.rows": (data["rows"],)}


def test_of_several_sources_the_one_is_named_and_the_line_of_its_function_shown(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(FILE)
    one = written(tmp_path / "one.jsonl", [{"prompt": "a", "completion": "b"}])
    two = {"source": written(tmp_path / "two.jsonl", [{"inputs": "a"}]), "rows": f"{tmp_path}/f.py:alpaca"}

    def opened(**keys: str) -> None:
        data = {"source": one, "more": [{**two, **keys}]}
        recipe = recipe_of({"model": "m", "algorithm": "sft", "steps": 1, "data": data})
        open_rows(checked_flow(recipe), recipe)

    with pytest.raises(DataError, match=r"source `two`: .*two\.jsonl:1: `data\.rows` .*KeyError") as caught:
        opened()
    assert 'if not row["output"].strip()' in caught.value.frames
    with pytest.raises(ConfigError, match=r"source `two`: `data\.rows`: .*has no `song`"):
        opened(rows=f"{tmp_path}/f.py:song")


def test_a_recipe_in_the_folder_of_a_run_runs_it_only_if_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.lock").touch()
    path = tmp_path / "recipe.yaml"
    further = [{"source": "b.jsonl", "rows": "b.py:b"}]
    data = {"source": "a.jsonl", "rows": "a.py:a", "more": further}
    path.write_text(json.dumps({"model": "m", "algorithm": "sft", "steps": 1, "data": data}))
    with pytest.raises(ConfigError, match=r"names code to run \(`data\.rows`: a\.py:a; `data\.more\.rows`: b\.py:b\)"):
        user_recipe(path, ())
    with pytest.raises(ConfigError, match=r"names code to run \(`data\.more\.rows`: b\.py:b\)"):
        user_recipe(path, [("data.rows", "a.py:a")])
    named = [("data.rows", "a.py:a"), ("data.more", further)]
    check_origin(path, user_recipe(path, named), named)
    sets = [{"source": "c.jsonl", "rows": "c.py:c"}]
    tree = {"model": "m", "algorithm": "sft", "steps": 1, "data": {"source": "a.jsonl"}}
    path.write_text(json.dumps({**tree, "evaluation": {"items": 1, "sets": sets}}))
    with pytest.raises(ConfigError, match=r"names code to run \(`evaluation\.sets\.rows`: c\.py:c\)"):
        user_recipe(path, ())
    user_recipe(path, [("evaluation.sets", sets)])
