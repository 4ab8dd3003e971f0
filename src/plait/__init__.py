"""plait: you write the RLHF algorithm as a plain function; plait plans how to run it, and runs what it planned."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.runtime.api import train as train

if sys.platform == "win32":
    raise ImportError("plait runs on Linux, and on macOS; on Windows it runs in WSL, the Linux within")

__version__ = "0.1.0"
__all__ = ["__version__", "train"]


def __getattr__(name: str) -> Any:
    """`plait.train` is loaded when it is first used, so that `import plait` needs no torch."""
    if name == "train":
        from plait.runtime.api import train

        return train
    raise AttributeError(f"module `plait` has no attribute `{name}`")
