"""Files of forms that are not read: what to say of them, and how rows are made of them. Torch-free."""

from __future__ import annotations

from pathlib import Path

GZIP = b"\x1f\x8b"
"""How files that gzip packed begin."""
_PACKED = {
    b"(\xb5/\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"PK\x03\x04": "zip",
}
_UTF_16 = b"\xff\xfe", b"\xfe\xff"
"""How texts in that encoding begin, as those that Windows programs call Unicode."""
_UTF_16_BYTES = b"\xff\xfe\0"
SEPARATED = {".csv": ",;", ".tsv": "\t"}
"""By the end of a file's name, what may separate its cells; the first is taken unless only the other is in its header,
as where Excel writes decimal commas."""
_TO_JSON = 'to_json("rows.jsonl", orient="records", lines=True)'
_TABLES = {
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
        error: of reading all of it, unpacked.
        key: that names the file.
    """
    takes = f"`{key}` takes JSONL, JSON or CSV as UTF-8, or Parquet in a file named *.parquet"
    begin = error.object[:6]
    utf_16 = begin.startswith(_UTF_16)
    line = error.object[: error.start].count(b"\n") + 1
    fault = "UTF-16" if utf_16 else f"not UTF-8 (line {line}: {error.reason} at byte {error.start})"
    if table := _of_table(path):
        return f"`{path}` is {fault}; {takes}: {table}"
    if program := _packer_of(begin):
        return f"`{path}` is packed by {program}; {takes}: unpack it"
    end = Path(path.name.removesuffix(".gz")).suffix.lower()
    if end not in SEPARATED and not begin.lstrip(_UTF_16_BYTES).startswith((b"{", b"[")):
        return f"`{path}` is {fault}; {takes}"
    encoding = "UTF-16" if utf_16 else "WINDOWS-1252"
    other = "" if utf_16 else ", if this is its encoding"
    told = f"iconv -f {encoding} -t UTF-8"
    command = f"zcat {path} | {told}" if path.suffix == ".gz" else f"{told} {path}"
    return f"`{path}` is {fault}; {takes}: {command} > rows{end if end in SEPARATED else '.jsonl'}{other}"


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
    if program := _packer_of(line.encode()[:6]):
        return f"it is packed by {program}: unpack it"
    if line.count(",") and not line.lstrip().startswith(("{", "[")):
        return f"{takes}; a table is read from a file named *.csv or *.tsv"
    return takes


def _of_table(path: Path) -> str:
    """How rows are made of a table that is known by its name; empty for others."""
    made = _TABLES.get(path.suffix.lower())
    return "" if made is None else f"of a table make such a file by {made.format(path)}"
