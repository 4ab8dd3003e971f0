"""What a run computed, as a record keeps it: values of metrics, digests of samples and weights; and what differs.

Imports no plait.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors
import torch

TIMES = ("timing_", "perf_", "perf/")
"""Beginnings of the names of metrics that two equal runs may differ in."""

IN_ANY_ORDER = re.compile(r"(^|/)(reward|cost)s/[^/]+/mean$")
"""Metrics that the sources of the record summed in the order in which groups came, which is a matter of time where
several ranks generate: they may differ from the record in the last places."""

Series = dict[str, list[Any]]
"""Name → its value in each row of a log, None where the row has none."""


def record_of(run_dir: Path) -> dict[str, Any]:
    """metrics and evaluations: a Series each. samples: file → column → digest of all that its rows say. weights: file
    → digest. Of a run in one folder."""
    return {
        "metrics": _series(run_dir / "metrics.jsonl"),
        "evaluations": _series(run_dir / "evaluations.jsonl"),
        "samples": {path.name: _columns(path) for path in sorted((run_dir / "samples").glob("*.jsonl"))},
        "weights": {
            path.relative_to(run_dir).as_posix(): _weights(path)
            for name in ("final", "best", "merged")
            for path in sorted((run_dir / name).glob("*.safetensors"))
        },
    }


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _series(path: Path) -> Series:
    rows = _rows(path)
    names = sorted({name for row in rows for name in row if not name.startswith(TIMES)})
    return {name: [row.get(name) for row in rows] for name in names}


def _columns(path: Path) -> dict[str, str]:
    rows = _rows(path)
    names = sorted({name for row in rows for name in row})
    return {name: _digest(json.dumps([row.get(name, "absent") for row in rows]).encode()) for name in names}


def _weights(path: Path) -> str:
    """A digest of names, dtypes, shapes and bytes; not of how the file has them."""
    hasher = hashlib.sha256()
    with safetensors.safe_open(path, framework="pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name).contiguous()
            hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            hasher.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:16]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def differences(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(errors, news): what the record has and the run lacks or has otherwise; what only the run has."""
    errors: list[str] = []
    news: list[str] = []
    for log in ("metrics", "evaluations"):
        old, new = recorded[log], found[log]
        news += [f"{log}: {name} is new" for name in sorted(new.keys() - old.keys())]
        for name, values in old.items():
            same = _near if IN_ANY_ORDER.search(name) else _same
            errors += _series_differences(f"{log}: {name}", values, new.get(name), same)
    for part in ("samples", "weights"):
        old, new = dict(_flat(recorded[part])), dict(_flat(found[part]))
        news += [f"{part}: {name} is new" for name in sorted(new.keys() - old.keys())]
        for name, digest in old.items():
            if name not in new:
                errors.append(f"{part}: {name} is missing")
            elif new[name] != digest:
                errors.append(f"{part}: {name} has other bits (recorded {digest}, found {new[name]})")
    return errors, news


def _series_differences(
    what: str, old: list[Any], new: list[Any] | None, same: Callable[[Any, Any], bool]
) -> Iterator[str]:
    if new is None:
        yield f"{what} is missing"
        return
    if len(old) != len(new):
        yield f"{what} has {len(new)} rows, recorded are {len(old)}"
    for row, (before, now) in enumerate(zip(old, new, strict=False), start=1):
        if not same(before, now):
            yield f"{what}, row {row}: recorded {before!r}, found {now!r}"


def _same(a: Any, b: Any) -> bool:
    """To the last bit; 1 and 1.0 are the same, 0.0 and -0.0 are not, NaN is like NaN."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return float(a).hex() == float(b).hex()
    return a == b


def _near(a: Any, b: Any) -> bool:
    return _same(a, b) or (
        isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-14, abs_tol=1e-14)
    )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name} ")
        else:
            yield prefix + name, value


def fingerprint() -> dict[str, str]:
    """What rounding depends on beside the sources: the processor, and the libraries that compute."""
    lines = _text("/proc/cpuinfo").split("\n\n")[0].splitlines()
    info = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = sorted(flag for flag in info.get("flags", "").split() if flag.startswith(("avx", "amx", "fma", "sse4")))
    return {
        "machine": platform.machine(),
        "processor": " ".join(info.get(key, "?") for key in ("vendor_id", "cpu family", "model")),
        "flags": " ".join(flags),
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy", "numba", "llvmlite", "transformers")},
    }


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
