"""This machine by name, and by what its kind does, where nothing was measured. Imports torch for CUDA alone."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

from plait.cost.calibration import VENDORS, Calibration
from plait.cost.cluster import ClusterSpec
from plait.cost.gpu_links import links_of_kind
from plait.cost.hardware import Device, Link, Software, known_device
from plait.launch.machine import cpu_cores, cpu_flags, cpu_name, usable_cores
from plait.memory_limits import limit


def machine_name(device: str) -> str:
    """In words: the CPU with its cores, or the GPU."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {os.cpu_count()} cores"


def threads_alone(asked: int) -> int:
    """Compute threads of a process that has this machine to itself.

    Args:
        asked: 0 takes what OMP_NUM_THREADS says (of a list, as OpenMP knows them, its first number), else one per core
            that this process may use.
    """
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return asked or (int(said) if said.isdecimal() else 0) or usable_cores()


def peak_of_gpus(dtype: str) -> float | None:
    """Floating point operations per second of each GPU of this machine, as the vendor states them; None: plait does not
    know them, or they are of several kinds."""
    import torch

    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds = {known_device(one.name, one.total_memory) for one in properties}
    peaks = {None if kind is None else kind.flops_of(dtype) for kind in kinds}
    return peaks.pop() if len(peaks) == 1 else None


@dataclass(frozen=True)
class CpuKind:
    """What a core does on CPUs with the same instructions, in the layers of a model: products with all that is between
    them, in scoring and in training.

    flags:    all of them, by Linux's names
    bfloat16: flops per second in bfloat16
    float32:  the same in float32
    """

    name: str
    flags: frozenset[str]
    bfloat16: float
    float32: float


_AVX512 = frozenset(("avx512f", "avx512vl", "avx512bw"))
KINDS = (
    CpuKind("AVX-512 and matrix units", _AVX512 | {"avx512_bf16", "amx_bf16"}, 350e9, 150e9),
    CpuKind("AVX-512, bfloat16 and AVX-VNNI", _AVX512 | {"avx512_bf16", "avx_vnni"}, 350e9, 150e9),
    CpuKind("AVX-512 and bfloat16", _AVX512 | {"avx512_bf16"}, 175e9, 90e9),
    CpuKind("AVX-512", _AVX512, 150e9, 150e9),
    CpuKind("AVX2", frozenset(("avx2", "fma")), 50e9, 50e9),
    CpuKind("neither AVX2 nor AVX-512", frozenset(), 10e9, 10e9),
)
"""The first whose flags a CPU has (ADR 72). GFLOP/s of one core in steps of SmolLM2-135M, bfloat16: 332 to 370 on an
AMD EPYC of Zen 5, 325 to 417 on an Intel Xeon with matrix units, 160 to 180 on an EPYC of Zen 4, 48 to 54 on one with
AVX2. Zen 4 computes 512 bits in two halves; Zen 5 does not, and has AVX-VNNI, by which Linux tells the two apart.
Float32: of 220 that products alone have on Zen 5, the share that a step has in bfloat16; on Zen 4 a step has 85 to 95.
With AVX-512 alone, and with neither, nothing was measured."""
CORE_BANDWIDTH, MACHINE_BANDWIDTH = 16e9, 100e9
"""Bytes per second that one core reads (15 to 17 on the same machines, 30 on Zen 5), and at most all together."""
GLOO = Link(1e9, 200e-6)
"""Between processes of a machine, as two of them had it in the sums and moves of a step."""


def cpu_kind(flags: Collection[str]) -> CpuKind:
    """The kind of a CPU with these flags."""
    return next(kind for kind in KINDS if kind.flags <= set(flags))


def unmeasured(device: str, devices: int, threads: int) -> tuple[ClusterSpec, Calibration]:
    """A cluster of devices of this machine by the typical numbers of their kind, without a measurement, and the words
    that say so.

    Args:
        threads: of each process, on a CPU; threads beyond the number of cores add nothing.
    """
    return _unmeasured_gpus(devices) if device == "cuda" else _unmeasured_cpu(devices, threads)


def _unmeasured_cpu(devices: int, threads: int) -> tuple[ClusterSpec, Calibration]:
    kind, cores = cpu_kind(cpu_flags()), min(threads, cpu_cores() / devices)
    bandwidth = min(cores * CORE_BANDWIDTH, MACHINE_BANDWIDTH / devices)
    memory = limit().bytes // devices
    cpu = Device("cpu", cores * kind.bfloat16, memory, bandwidth, 1e-6, cores * kind.float32)
    software = Software(products=1.0, memory=1.0, links=1.0, layer_s=300e-6, hop_s=400e-6)
    cluster = ClusterSpec(1, devices, cpu, GLOO, GLOO, Link(4e9, 1e-5), name="this machine", software=software)
    source = f"what CPUs with {kind.name} do, as this one was not measured (`plait profile` does)"
    return cluster, Calibration(source)


def _unmeasured_gpus(devices: int) -> tuple[ClusterSpec, Calibration]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    known = known_device(properties.name, properties.total_memory)
    flops, bandwidth = (100e12, 1e12) if known is None else (known.flops, known.memory_bandwidth)
    gpu = Device(properties.name, flops, properties.total_memory, bandwidth)
    near = links_of_kind(properties.name, properties.total_memory)
    cluster = ClusterSpec(1, devices, gpu, near.link, near.link, Link(20e9, 10e-6), name="this machine")
    whose = VENDORS.source if known is not None else f"an estimate, as plait does not know the {properties.name}"
    source = f"{whose}; it was not measured (`plait profile --device cuda` does)"
    return cluster, Calibration(f"{source}; {near.label}" if devices > 1 else source)
