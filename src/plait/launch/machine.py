"""What this machine has, as far as it can be known without torch."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version


def visible_devices() -> int:
    """CUDA devices that this process may use, without torch: those of CUDA_VISIBLE_DEVICES, else of the driver."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([device for device in listed.split(",") if device.strip() and device.strip() != "-1"])
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    return 0


def versions() -> tuple[tuple[str, str], ...]:
    """What must be equal on all nodes, without importing any of it."""
    installed = [("Python", platform.python_version())]
    for name in ("plait", "torch", "transformers", "numpy"):
        try:
            installed.append((name, version(name)))
        except PackageNotFoundError:
            installed.append((name, "nothing"))
    return tuple(installed)
