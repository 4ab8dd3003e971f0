"""Which steps have a folder among a run's checkpoints; reads no tensor, and so imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

_STEP_NAME = re.compile(r"step-(0|[1-9]\d*)(\.replaced)?", re.ASCII)


def steps_in(folder: Path) -> list[int]:
    """The steps that have a folder in `checkpoints/`, ascending; whether each is whole is not checked."""
    if not folder.is_dir():
        return []
    names = (_STEP_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted({int(name.group(1)) for name in names if name})
