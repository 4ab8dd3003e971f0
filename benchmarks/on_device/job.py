"""What a part is told, models of a wanted shape with random weights, and what a device can do at best."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path

from random_llama import word_tokenizer, write_llama


@dataclass(frozen=True)
class Shape:
    """A Llama of the size of a known model: no weights need to be at hand, and the work is the same."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int


SHAPES = {
    "135M": Shape(576, 1536, 30, 9, 3, 49_152),
    "0.5B": Shape(896, 4864, 24, 14, 2, 151_936),
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151_936),
    "tiny": Shape(128, 256, 2, 4, 2, 512),
    "tinier": Shape(64, 128, 1, 2, 1, 512),
}
"""As SmolLM2-135M, as Qwen2.5-0.5B and 1.5B (without their biases), and two that prove that a part runs: their heads
have 32 numbers, as vLLM has no kernels for fewer on a CPU."""
POSITIONS = 4096


@dataclass(frozen=True)
class Job:
    """device: cuda or cpu; folder: has the models, by the names of their shapes; report: gets what is measured; ends:
    when a part is stopped, as `time.time` has it"""

    device: str
    dtype: str
    shapes: tuple[str, ...]
    is_tiny: bool
    folder: str
    report: str
    ends: float = inf

    def of_shape(self, shape: str) -> Job:
        """The same of one shape alone."""
        return replace(self, shapes=(shape,))

    def record(self, part: str, shape: str, **found: object) -> None:
        """A line of results, which is there whatever becomes of the part afterwards."""
        with open(Path(self.report) / "results.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"part": part, "shape": shape, **found}) + "\n")

    def model(self, shape: str) -> str:
        """The checkpoint of a shape, written when it is first asked for."""
        folder, sizes = Path(self.folder) / shape, SHAPES[shape]
        if not folder.exists():
            part = folder.with_name(f"{shape}-{os.getpid()}")  # whoever is stopped here leaves no half of a checkpoint
            write_llama(
                part,
                word_tokenizer(sizes.vocabulary),
                hidden=sizes.hidden,
                intermediate=sizes.intermediate,
                layers=sizes.layers,
                heads=sizes.heads,
                kv_heads=sizes.kv_heads,
                positions=POSITIONS,
                dtype=self.dtype,
                device=self.device,
            )
            part.rename(folder)
        return str(folder)

    def saved(self) -> Path:
        """The file that a part is given; in a folder of its own, so that the parts of shapes meet nowhere."""
        folder = Path(self.folder) / "-".join(("job", *self.shapes))
        folder.mkdir(exist_ok=True)
        path = folder / "job.json"
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls) -> Job:
        """The job that this process is given."""
        return cls.load(Path(sys.argv[1]))

    @classmethod
    def load(cls, path: Path) -> Job:
        """What `saved` has written."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        return cls(**raw | {"shapes": tuple(raw["shapes"])})


def random_ids(count: int, vocabulary: int, seed: int) -> tuple[int, ...]:
    """A prompt of token ids, none of them special."""
    draw = random.Random(seed)
    return tuple(draw.randrange(2, vocabulary) for _ in range(count))


@dataclass(frozen=True)
class Rates:
    """What a device did in copies and large products, and what its vendor says, where it is known (0 otherwise)."""

    name: str
    bytes_per_s: float
    """Read and written bytes both counted."""
    flops_per_s: float
    stated_bytes_per_s: float
    stated_flops_per_s: float

    @property
    def best_bytes_per_s(self) -> float:
        """What shares are of: the vendor's number, or the measured one."""
        return self.stated_bytes_per_s or self.bytes_per_s

    @property
    def best_flops_per_s(self) -> float:
        """See `best_bytes_per_s`."""
        return self.stated_flops_per_s or self.flops_per_s

    def __str__(self) -> str:
        stated = f", stated {self.stated_bytes_per_s / 1e9:.0f} GB/s and {self.stated_flops_per_s / 1e12:.0f} TFLOP/s"
        measured = f"{self.bytes_per_s / 1e9:.0f} GB/s, {self.flops_per_s / 1e12:.1f} TFLOP/s measured"
        return f"{self.name}: {measured}{stated if self.stated_bytes_per_s else ''}"


def rates_of(job: Job) -> Rates:
    import torch

    from plait.cost.hardware import known_device

    device, dtype = torch.device(job.device), getattr(torch, job.dtype)
    count, size = (1 << 28, 8192) if device.type == "cuda" else (1 << 20, 256)
    source = torch.ones(count, dtype=torch.float32, device=device)
    target, square = torch.empty_like(source), torch.ones(size, size, dtype=dtype, device=device)
    copy_s = best_seconds(lambda: target.copy_(source), job.device)
    product_s = best_seconds(lambda: square @ square, job.device)
    name, known = "CPU", None
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
        known = known_device(name, torch.cuda.get_device_properties(0).total_memory)
    stated = (known.memory_bandwidth, known.flops_of(job.dtype)) if known else (0.0, 0.0)
    return Rates(name, 8 * count / copy_s, 2 * size**3 / product_s, *stated)


def best_seconds(compute: Callable[[], object], device: str, times: int = 10) -> float:
    """The shortest of some times, a first one left out."""
    found = []
    for _ in range(1 + times):
        synchronize(device)
        began = time.perf_counter()
        compute()
        synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found[1:])


def most_bytes(device: str) -> int:
    """That this process has had of a GPU at a time, since it was asked last; of a CPU nobody knows: 0."""
    if device != "cuda":
        return 0
    import torch

    most = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return most


def synchronize(device: str) -> None:
    """Wait for what the device was given."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
