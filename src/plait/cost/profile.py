"""What a machine was measured to do with a model: the file that `plait profile` writes, and its answers in between.

Seconds are of one layer, so a profile of few layers says what many take. Between measured sizes they are on straight
lines; below the least they are that one's, above the largest they go on as steeply as at the end. Torch-free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from pydantic import Field, ValidationError

from plait.cost.cluster import ClusterSpec
from plait.cost.hardware import GIB, Device, Link, Software
from plait.data.package_file import cache_folder
from plait.errors import DataError
from plait.file_form import FileForm
from plait.models.shape import ModelShape
from plait.output import write_file
from plait.settings import Settings

FORM = FileForm("profile")

Points = tuple[tuple[int, float], ...]
"""(size, seconds), sizes ascending."""


class LinkRecord(Settings):
    bytes_per_s: float = Field(gt=0)
    latency_s: float = Field(ge=0)


class Profile(Settings):
    """
    forward, backward: (tokens of a row, seconds of a layer)
    decode:            (samples, tokens of context of each, seconds of a layer)
    head:              (rows, seconds of the head's forward)
    products:          (rows, floating point operations per second of a product with a layer's largest matrix)
    error:             mean of |predicted / measured - 1| over whole steps of sizes that were not among the points
    """

    machine: str
    device: str
    threads: int = Field(ge=1)
    dtype: str = Field(pattern="^(bfloat16|float32|float64)$")
    model: str
    shape: ModelShape
    memory_gib: float = Field(gt=0)
    forward: Points = Field(min_length=2)
    backward: Points = Field(min_length=2)
    decode: tuple[tuple[int, int, float], ...] = Field(min_length=2)
    head: Points = Field(min_length=2)
    products: Points = Field(min_length=1)
    copy_bytes_per_s: float = Field(gt=0)
    packing_bytes_per_s: float | None = Field(None, gt=0)
    send: LinkRecord
    all_reduce: LinkRecord
    error: float = Field(ge=0)

    def layer_s(self, tokens: float, *, backward: bool) -> float:
        """Seconds of a layer over a row of so many tokens."""
        return interpolated(self.backward if backward else self.forward, tokens)

    def decode_s(self, samples: float, context: float) -> float:
        """Seconds of a layer for one token more of each sample.

        Args:
            context: tokens of all samples together.
        """
        each = context / samples
        rows: dict[int, list[tuple[int, float]]] = {}
        for count, tokens, seconds in self.decode:
            rows.setdefault(count, []).append((tokens, seconds))
        return interpolated([(count, interpolated(points, each)) for count, points in sorted(rows.items())], samples)

    def head_s(self, rows: float) -> float:
        """Seconds of the head over so many rows, forward alone."""
        return interpolated(self.head, rows)

    def cluster(self, devices: int = 1) -> ClusterSpec:
        """So many processes of this machine, which share its memory; links are as two of them had them."""
        flops = max(rate for _, rate in self.products)
        memory = int(self.memory_gib * GIB) // (devices if self.device == "cpu" else 1)
        device = Device(self.machine, flops, memory, self.copy_bytes_per_s, 0.0, flops)
        link = Link(self.all_reduce.bytes_per_s, self.all_reduce.latency_s)
        send = Link(self.send.bytes_per_s, self.send.latency_s)
        exact = Software(1.0, 1.0, 1.0, 0.0, 0.0)
        return ClusterSpec(1, devices, device, link, send, send, None, f"{devices}x{self.machine}", exact)

    def save(self, path: Path) -> None:
        record = {"format": FORM.format, "version": FORM.version, **self.model_dump(mode="json")}
        write_file(path, json.dumps(record, indent=1) + "\n")


def load_profile(path: Path) -> Profile:
    """
    Raises:
        DataError: it cannot be read, or a key is missing, unknown or does not fit.
    """
    record = FORM.parse(FORM.text_of(path), str(path))
    try:
        return Profile.model_validate({key: value for key, value in record.items() if key not in ("format", "version")})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise DataError(f"{path}: `{key}`: {first['msg'][:1].lower()}{first['msg'][1:]}") from None


def profile_path(machine: str, model: str, dtype: str, threads: int) -> Path:
    """Where a profile is kept: by the machine, the model's shape, the dtype and the threads."""
    name = re.sub(r"[^a-z0-9.]+", "-", f"{machine} {model} {dtype} {threads}".lower()).strip("-")
    return cache_folder() / "profiles" / f"{name}.json"


def interpolated(points: Sequence[tuple[int, float]], at: float) -> float:
    """On straight lines between points; see the module."""
    if at <= points[0][0] or len(points) == 1:
        return points[0][1]
    for (low, left), (high, right) in pairwise(points):
        if at <= high:
            return left + (right - left) * (at - low) / (high - low)
    (low, left), (high, right) = points[-2:]
    return right + max(0.0, right - left) / (high - low) * (at - high)
