"""Responses on disk as soon as they are finished, so that what breaks a run off takes none of them along, and the same
command with `--resume` draws only those that are missing.

`OUT.partial`, beside the output, begins with what the run was asked for; behind that stand the responses in the order
in which they ended.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from plait.errors import ConfigError, RunError
from plait.file_form import FileForm
from plait.file_lock import is_taken
from plait.file_writes import why_not_written
from plait.observe.run_log import RunLog, encode_row, read_rows

FORM = FileForm("generation")


def kept_path(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


class Kept:
    """What is finished of a run, on disk. Use as a context manager.

    Args:
        asked: what decides the responses, by option; a run is resumed with the same.
        resume: take up what an earlier run left.
        overwrite: drop what an earlier run left.

    Raises:
        ConfigError: there is an earlier run, and neither is said; or there is none to resume, or it was asked for
            something else; or another process is at it.
    """

    def __init__(self, out: Path, asked: Mapping[str, Any], *, resume: bool, overwrite: bool) -> None:
        self.path = kept_path(out)
        self._asked = dict(asked)
        self.rows: list[dict[str, Any]] = []
        """Counts of the finished responses, those of earlier runs included."""
        self._log: RunLog | None = None
        """Locked while this process writes."""
        exists = self.path.exists()
        if resume and not exists:
            raise ConfigError(f"--resume: there is no `{self.path}` to go on from; leave --resume out to begin")
        if exists and (resume or overwrite) and self._taken(os.O_RDWR) is None:
            raise ConfigError(f"--out: another process writes `{self.path}`; wait for it, end it, or give another file")
        if resume:
            try:
                self.rows = self._read()
            except ConfigError:
                self.close()
                raise
        elif exists and overwrite:
            self.drop()
        elif exists:
            raise ConfigError(
                f"--out: `{self.path}` holds the responses of an interrupted run; go on with --resume, begin "
                "again with --overwrite, or give another file"
            )

    @property
    def done(self) -> set[tuple[int, int]]:
        """(row, sample) of every finished response."""
        return {(row["row"], row["sample"]) for row in self.rows}

    def add(self, row: dict[str, Any]) -> None:
        """A finished response (`generation_report.row_of`).

        Raises:
            RunError: the file system refuses it, or another process has begun to write there.
        """
        head = {**FORM.head, "asked": self._asked}
        try:
            log = self._log or self._taken(os.O_RDWR | os.O_CREAT | os.O_EXCL)
            if log is None:
                raise RunError(f"another process has begun to write `{self.path}`; give each run a file of its own")
            try:
                for each in [*([] if log.offset else [head]), row]:
                    log.append(each)
            except RunError:
                if not self.rows:
                    self.drop()
                raise
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {why_not_written(self.path, error)}") from error
        self.rows.append(row)

    def ordered(self) -> list[dict[str, Any]]:
        """The rows in the order of the prompts."""
        return sorted(self.rows, key=lambda row: (row["row"], row["sample"]))

    def drop(self) -> None:
        """All of it stands in `out` now."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let another process have it. May be called twice."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _taken(self, flags: int) -> RunLog | None:
        """Open the file and lock it, until this process ends or drops it; None: another process has it."""
        try:
            opened = os.open(self.path, flags | os.O_APPEND, 0o666)
        except (FileExistsError, FileNotFoundError):
            return None
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, opened)
            if is_taken(opened, self.path):
                self._log = RunLog(self.path, resume=True, opened=opened)
                stack.pop_all()
        return self._log

    def _read(self) -> list[dict[str, Any]]:
        try:
            head, *rows = read_rows(self.path)
            places = [(row["row"], row["sample"]) for row in rows]
            before = head["asked"] if head.get("format") == FORM.format else None
        except (ValueError, KeyError):
            before, places, rows = None, [], []
        if before is None or len(set(places)) != len(places):
            raise ConfigError(
                f"--resume: `{self.path}` is not a file that `plait generate` wrote; move it, and leave --resume out"
            )
        asked = json.loads(encode_row(self._asked))
        changed = [f"--{name}" for name in (asked | before) if before.get(name) != asked.get(name)]
        if changed:
            raise ConfigError(
                f"--resume: `{self.path}` was begun with another {', '.join(changed)}; give the options as they were, "
                "or begin again with --overwrite"
            )
        return rows
