"""What this machine has, as far as it can be known without torch."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

GPUS = Path("/proc/driver/nvidia/gpus")


def visible_devices() -> int:
    """CUDA devices that this process may use, without torch: those of CUDA_VISIBLE_DEVICES, else of the driver."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([device for device in listed.split(",") if device.strip() and device.strip() != "-1"])
    with contextlib.suppress(OSError):
        return len(os.listdir(GPUS))
    return 0


def hardware() -> tuple[tuple[str, str], ...]:
    """(`device` of a recipe, its kind on this machine in words), of the CPU and of GPUs, as far as the system says it
    without torch. Kinds of GPUs are in the order of their names, whichever slots they are in."""
    models: set[str] = set()
    for file in GPUS.glob("*/information"):
        with contextlib.suppress(OSError):
            lines = (line.partition(":") for line in file.read_text().splitlines())
            models |= {value.strip() for key, _, value in lines if key == "Model"}
    kinds = {"cpu": cpu_name(), "cuda": " and ".join(sorted(models))}
    return tuple((device, kind) for device, kind in kinds.items() if kind)


def cpu_name() -> str:
    """The model of this machine's processor; else what kind it is."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions() -> tuple[tuple[str, str], ...]:
    """What must be equal on all nodes, without importing any of it."""
    installed = [("Python", platform.python_version())]
    for name in ("plait", "torch", "transformers", "numpy"):
        try:
            installed.append((name, version(name)))
        except PackageNotFoundError:
            installed.append((name, "nothing"))
    return tuple(installed)
