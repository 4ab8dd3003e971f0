"""Rows of a data set as a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def written(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    """The path, where these rows then stand as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
