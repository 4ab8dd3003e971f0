"""Files of text: JSONL, a list in JSON, CSV; each also packed by gzip."""

import csv
import gzip
import json
from pathlib import Path

import pytest

from plait.data.formats import RowKind
from plait.data.settings import DataSettings
from plait.data.sources import open_splits, read_rows
from plait.data.text_files import text_records
from plait.errors import DataError

ROWS = [
    {"prompt": 'Say "hé, 🙂"', "answer": "x,y\nz", "level": 3, "share": 0.5, "easy": True},
    {"prompt": "", "answer": "", "level": None, "share": -1e-05, "easy": False},
]


def as_list(rows: list[dict]) -> str:
    return json.dumps(rows, indent=1)


def as_lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def as_table(rows: list[dict], separator: str = ",") -> str:
    """As `csv` of Python writes them."""
    with open("rows.tmp", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)
    return Path("rows.tmp").read_bytes().decode()


def columns(name: str) -> list[dict]:
    return [record for record, _ in text_records(Path(name), "data.source")]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", as_lines),
        ("a.json", as_list),
        ("a.jsonl", as_list),
        ("a.csv", as_table),
        ("a.CSV", lambda rows: as_table(rows, ";")),
        ("a.tsv", lambda rows: as_table(rows, "\t")),
    ],
)
def test_each_form_gives_the_same_records(tmp_path, monkeypatch, name, text, packed):
    monkeypatch.chdir(tmp_path)
    content = ("\ufeff" + text(ROWS)).encode()
    name += ".gz" if packed else ""
    Path(name).write_bytes(gzip.compress(content) if packed else content)
    assert columns(name) == ROWS


def table(text: str) -> list[dict]:
    Path("a.csv").write_text(text)
    return columns("a.csv")


def test_what_the_cells_of_a_table_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    limit = csv.field_size_limit()
    assert table("a,b,c,d\n1,1,true,\n2,x,FALSE,\n") == [
        {"a": 1, "b": "1", "c": True, "d": ""},
        {"a": 2, "b": "x", "c": False, "d": ""},
    ]
    # An identifier is no number, and of a column of both kinds each cell is what stands there.
    assert table("a,b,c,d\n007,true,+1,1e999\n8,1,2,1\n") == [
        {"a": "007", "b": "true", "c": "+1", "d": "1e999"},
        {"a": "8", "b": "1", "c": "2", "d": "1"},
    ]
    # Days and times are texts as they stand; what is read or learnt as text is text.
    assert table("day,prompt,completion\n2026-01-02 10:30,12,7\n") == [
        {"day": "2026-01-02 10:30", "prompt": "12", "completion": "7"}
    ]
    assert table(",prompt\n0,a\n\n1,b\n") == [{"prompt": "a"}, {"prompt": "b"}], "pandas writes its index so"
    assert table(f"prompt\n{'x' * 200_000}\n")[0]["prompt"] == "x" * 200_000
    assert csv.field_size_limit() == limit
    assert table("") == table("prompt,answer\n") == []


def test_places_are_lines_of_a_table_and_items_of_a_list(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text('prompt,answer\n"two\nlines",1\nb,2\n')
    assert [row.place for row in read_rows(str(file))] == [f"{file}:2", f"{file}:4"]
    items = tmp_path / "a.json"
    items.write_text(as_list([{"prompt": "a"}, {"prompt": "b"}]))
    assert [row.place for row in read_rows(str(items))] == [f"{items}#1", f"{items}#2"]


def test_labels_of_a_table_are_true_and_false_as_pandas_writes_them(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("prompt,completion,label\na,b,True\na,c,False\n")
    assert [row.columns["label"] for row in read_rows(str(file), RowKind.LABELLED)] == [True, False]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json", "a.csv", "a.tsv.gz"])
def test_a_source_is_called_by_the_name_of_its_file_alone(name):
    assert DataSettings(source=f"folder/{name}").label == "a"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "a.csv",
            b"prompt,answer\na,b\na,b,c\n",
            r"a\.csv:3: expected 2 cells, as the header has, found 3; .*`,`",
        ),
        ("a.csv", b"prompt,answer\na\n", r"a\.csv:2: expected 2 cells, as the header has, found 1"),
        (
            "a.csv",
            b'prompt,answer\n"a"b,c\n',
            r"a\.csv:2: malformed table \(.*\); `data\.source` takes .* quoted",
        ),
        ("a.csv", b"prompt,answer,answer\na,b,c\n", "`data.source`: `a.csv` has several columns `answer`; keep one"),
        ("a.csv", b"prompt,answer\n", "`a.csv` holds no row; give another source in `data.source`"),
        ("a.csv", b"question,answer\na,b\n", r"a\.csv:2: .*no column `prompt`.*data\.prompt_column"),
        ("a.json", b'[{"prompt": "a"}, 3]', r"a\.json#2: expected a JSON object, found a number; .* a list of objects"),
        (
            "a.json",
            b'[{"prompt": "a"},\n]',
            r"a\.json: malformed JSON \(.* at line 2, column 1\); .* list of objects",
        ),
        ("a.json", b'["a"]\n["b"]\n', r"a\.json: malformed JSON \(Extra data at line 2, column 1\); .*one object per"),
        ("a.json", b"[]", "`a.json` holds no row"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "a"}', mtime=0)[:-9], "`a.jsonl.gz` is packed by gzip, and damaged"),
        ("a.jsonl.gz", b"\x1f\x8b\x08" + bytes(40), "`a.jsonl.gz` is packed by gzip, and damaged"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path, monkeypatch, name, content, said):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        open_splits(DataSettings(source=name))
