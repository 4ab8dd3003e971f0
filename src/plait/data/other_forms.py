"""Files that are neither JSONL nor Parquet: what to say of them, and how rows are made of them. Torch-free."""

from __future__ import annotations

from pathlib import Path

_PACKED = {
    b"\x1f\x8b": "gzip",
    b"(\xb5/\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"PK\x03\x04": "zip",
}
_TO_JSON = 'to_json("rows.jsonl", orient="records", lines=True)'
_TABLES = {
    ".csv": f'pandas.read_csv("{{}}").{_TO_JSON}',
    ".tsv": f'pandas.read_csv("{{}}", sep="\\t").{_TO_JSON}',
    ".xls": f'pandas.read_excel("{{}}").{_TO_JSON}',
    ".xlsx": f'pandas.read_excel("{{}}").{_TO_JSON}',
    ".feather": f'pandas.read_feather("{{}}").{_TO_JSON}',
    ".arrow": 'datasets.Dataset.from_file("{}").to_json("rows.jsonl")',
}
"""By the end of a file's name, the Python that makes JSONL of it."""


def no_text(path: Path, fault: str, key: str) -> str:
    """What to say of a file that is not read as UTF-8.

    Args:
        path: of the file.
        fault: where its bytes are no text.
        key: that names the file.
    """
    takes = f"`{key}` takes JSONL, or Parquet in a file named *.parquet"
    if table := _of_table(path):
        encoded = ' (with encoding="cp1252", or what it has)' if path.suffix.lower() in (".csv", ".tsv") else ""
        return f"`{path}` is not UTF-8 ({fault}); {takes}: {table}{encoded}"
    with path.open("rb") as file:
        begin = file.read(6)
    for mark, program in _PACKED.items():
        if begin.startswith(mark):
            return f"`{path}` is packed by {program}; {takes}: unpack it"
    return f"`{path}` is not UTF-8 ({fault}); {takes}"


def remedy(path: Path, line: str, key: str) -> str:
    """How a file becomes JSONL of which a line is no object.

    Args:
        path: of the file.
        line: that is none.
        key: that names the file.
    """
    takes = f"`{key}` takes one object per line"
    if table := _of_table(path):
        return f"{takes}: {table}"
    if line.lstrip().startswith("["):
        return f'{takes}: of a list make such a file by pandas.read_json("{path}").{_TO_JSON}'
    return takes


def _of_table(path: Path) -> str:
    """How rows are made of a table that is known by its name; empty for others."""
    made = _TABLES.get(path.suffix.lower())
    return "" if made is None else f"of a table make such a file by {made.format(path)}"
