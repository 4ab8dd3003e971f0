"""What this machine has, as far as it can be known without torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

GPUS = Path("/proc/driver/nvidia/gpus")
CPUS = Path("/proc/cpuinfo")


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
    named = (processor["model name"] for processor in _processors() if "model name" in processor)
    return next(named, "") or platform.processor() or platform.machine()  # `processor` starts a process


def cpu_flags() -> frozenset[str]:
    """What this machine's processor can do, by Linux's names (`avx2`, `avx512_bf16`); empty: nobody says."""
    return frozenset(next((processor["flags"] for processor in _processors() if "flags" in processor), "").split())


def usable_cores() -> int:
    """Threads of cores that this process may use: those of the machine, where the system does not divide them."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def cpu_cores() -> int:
    """Cores of this machine, each once however many threads it runs at a time; where nobody says, its processors."""
    places = [(processor.get("physical id"), processor.get("core id")) for processor in _processors()]
    if not places or any(core is None for _, core in places):
        return os.cpu_count() or 1
    return len(set(places))


def _processors() -> list[dict[str, str]]:
    """What Linux says of each processor, which is a thread of a core: key → value."""
    try:
        blocks = CPUS.read_text().strip().split("\n\n")
    except OSError:
        return []
    lines = ([line.partition(":") for line in block.splitlines()] for block in blocks)
    return [{key.strip(): value.strip() for key, _, value in of_one} for of_one in lines]


def versions() -> tuple[tuple[str, str], ...]:
    """What must be equal on all nodes, without importing any of it."""
    installed = [("Python", platform.python_version())]
    for name in ("plait", "torch", "transformers", "numpy"):
        try:
            installed.append((name, version(name)))
        except PackageNotFoundError:
            installed.append((name, "nothing"))
    return (*installed, ("the source of plait with digest", source_digest()))


def source_digest() -> str:
    """Twelve hexadecimal digits that are others where a file of plait's code is: a checkout that is worked on keeps its
    version. Hidden files are none of it: editors leave such, as links that lead nowhere."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("[!.]*.py")):
        code = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(code)}\0".encode())
        digest.update(code)
    return digest.hexdigest()[:12]
