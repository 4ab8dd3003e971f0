"""plait: you write the RLHF algorithm as a plain function; plait plans how to run it, and runs what it planned.

`plait.train` runs a recipe (`help(plait.train)`), `plait.dataflow` has what flows are written with, `plait.errors` what
is raised. The rest is plait's own.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.runtime.api import train as train

if sys.platform == "win32":
    raise ImportError("plait runs on Linux, and on macOS; on Windows it runs in WSL, the Linux within")

__version__ = "0.1.0"
__all__ = ["__version__", "train"]


def __dir__() -> list[str]:
    """What `help(plait)` and the completion of names show: also `train`, which is not loaded yet."""
    imported = {"Any", "TYPE_CHECKING", "annotations", "sys"}
    return sorted({*globals(), *__all__} - imported)


def __getattr__(name: str) -> Any:
    """`plait.train` is loaded when it is first used, so that `import plait` needs no torch."""
    if name == "train":
        from plait.runtime.api import train

        return train
    raise AttributeError(f"module `plait` has no attribute `{name}`")
