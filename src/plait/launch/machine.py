"""What this machine has, as far as it can be known without torch."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version


def visible_devices() -> int:
    """CUDA devices that this process may use, without torch: those of CUDA_VISIBLE_DEVICES, else of the driver."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    if said is not None:
        return len([one for one in said.split(",") if one.strip() and one.strip() != "-1"])
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    return 0


def versions() -> tuple[tuple[str, str], ...]:
    """What must be equal on all nodes, without importing any of it."""
    found = [("Python", platform.python_version())]
    for name in ("plait", "torch", "transformers", "numpy"):
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            found.append((name, "nothing"))
    return tuple(found)
