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
_UTF_16 = b"\xff\xfe", b"\xfe\xff"
"""How texts in that encoding begin, as those that Windows programs call Unicode."""
_UTF_16_BYTES = b"\xff\xfe\0"
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


def no_text(path: Path, error: UnicodeDecodeError, key: str) -> str:
    """What to say of a file that is not read as UTF-8.

    Args:
        path: of the file.
        error: of reading all of it.
        key: that names the file.
    """
    takes = f"`{key}` takes JSONL, or Parquet in a file named *.parquet"
    begin = _beginning(path)
    utf_16 = begin.startswith(_UTF_16)
    line = error.object[: error.start].count(b"\n") + 1
    fault = "UTF-16" if utf_16 else f"not UTF-8 (line {line}: {error.reason} at byte {error.start})"
    if table := _of_table(path):
        of_pandas = "utf-16" if utf_16 else "cp1252"
        encoded = f' (with encoding="{of_pandas}", or what it has)' if path.suffix.lower() in (".csv", ".tsv") else ""
        return f"`{path}` is {fault}; {takes}: {table}{encoded}"
    if program := _packer_of(begin):
        return f"`{path}` is packed by {program}; {takes}: unpack it"
    if not begin.lstrip(_UTF_16_BYTES).startswith(b"{"):
        return f"`{path}` is {fault}; {takes}"
    encoding = "UTF-16" if utf_16 else "WINDOWS-1252"
    other = "" if utf_16 else ", if this is its encoding"
    return f"`{path}` is {fault}; {takes}, as UTF-8: iconv -f {encoding} -t UTF-8 {path} > rows.jsonl{other}"


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(6)


def _packer_of(begin: bytes) -> str:
    """The program that packed a file that begins so; empty where none did."""
    return next((program for mark, program in _PACKED.items() if begin.startswith(mark)), "")


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
    if program := _packer_of(_beginning(path)):
        return f"it is packed by {program}: unpack it"
    if line.lstrip().startswith("["):
        return f'{takes}: of a list make such a file by pandas.read_json("{path}").{_TO_JSON}'
    return takes


def _of_table(path: Path) -> str:
    """How rows are made of a table that is known by its name; empty for others."""
    made = _TABLES.get(path.suffix.lower())
    return "" if made is None else f"of a table make such a file by {made.format(path)}"
