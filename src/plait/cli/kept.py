"""Responses on disk as soon as they are finished, so that what breaks a run off takes none of them along."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from plait.errors import ConfigError, RunError
from plait.observe.run_log import encode_row

if TYPE_CHECKING:
    from plait.data.records import Sample


def kept_path(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


class Kept:
    """The file beside `out` that finished responses are appended to, in the order in which they end.

    Raises:
        ConfigError: it is there already: an earlier run was broken off.
    """

    def __init__(self, out: Path) -> None:
        self.path = kept_path(out)
        self.count = 0
        if self.path.exists():
            raise ConfigError(
                f"--out: `{self.path}` holds the responses of a run that was broken off; move it, or give another file"
            )

    def add(self, sample: Sample) -> None:
        """Raises RunError where the file system refuses it."""
        from plait.runtime.generation_report import row_of

        try:
            with open(self.path, "ab") as file:
                file.write(encode_row(row_of(sample)))
        except OSError as error:
            if self.count == 0:
                self.drop()
            raise RunError(f"`{self.path}` cannot be written: {error.strerror or error}") from error
        self.count += 1

    def drop(self) -> None:
        """All of it stands in `out` now."""
        self.path.unlink(missing_ok=True)
