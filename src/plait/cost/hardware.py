"""What devices and links can do, as vendors state it, and what software makes of it.

Vendors' numbers (`Device`, `Link`) and the effective shares of them (`Software`) are kept apart: the first are facts,
the second are assumptions or fits. Bandwidths are bytes per second in one direction. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TERA, GIGA, GIB, MICRO = 1e12, 1e9, 1 << 30, 1e-6


@dataclass(frozen=True)
class Device:
    """
    flops:            dense, per second, in bfloat16; a multiplication and an addition are two
    memory_bytes:     of the device
    memory_bandwidth: bytes read or written per second
    launch_s:         from the start of a kernel to that of the next, where both are tiny
    flops_float32:    of the same products in float32; half as much in float64
    """

    name: str
    flops: float
    memory_bytes: int
    memory_bandwidth: float
    launch_s: float = 5 * MICRO
    flops_float32: float = 0.0

    def flops_of(self, dtype: str) -> float:
        """Dense flops per second in "bfloat16", "float32" or "float64"."""
        full = self.flops_float32 or self.flops / 2
        return {"bfloat16": self.flops, "float32": full, "float64": full / 2}[dtype]


@dataclass(frozen=True)
class Link:
    """bandwidth: bytes per second in one direction; latency_s: of a message"""

    bandwidth: float
    latency_s: float


def slowest_device(devices: Sequence[Device]) -> Device:
    """A device of which each number is the worst among these devices; the device itself if they are all of one kind."""
    first, *others = devices
    if all(device == first for device in others):
        return first
    return Device(
        " + ".join(dict.fromkeys(device.name for device in devices)),
        min(device.flops for device in devices),
        min(device.memory_bytes for device in devices),
        min(device.memory_bandwidth for device in devices),
        max(device.launch_s for device in devices),
        min(device.flops_of("float32") for device in devices),
    )


def slowest_link(links: Sequence[Link]) -> Link:
    """The least bandwidth, and the longest latency."""
    return Link(min(link.bandwidth for link in links), max(link.latency_s for link in links))


@dataclass(frozen=True)
class Software:
    """What programs make of the hardware, as shares of a vendor's number, and how they go about it.

    products:                of `Device.flops`, in large matrix products
    memory:                  of `Device.memory_bandwidth`
    links:                   of every link's bandwidth
    layer_s:                 a layer takes so long at least, however few its tokens: kernels are launched one by one
    hop_s:                   from one pipeline stage to the next while tokens are drawn, beside the link's own time
    micro_batches_per_stage: of a pipeline, in training and scoring, at least
    decode_groups_per_stage: of a pipeline that generates: groups of samples that go round at the same time; 0: all
                             samples are one group, and one stage in pp is busy; None: as many as plait's own rule says
    pool_share:              of a device's memory that the pool of keys and values takes while tokens are drawn, less
                             all weights and optimizer state that are there, so that no more samples run than the pool
                             has room for; 0: as many as may run
    switch_s:                a move of weights takes so long beside its bytes: engines sleep and wake, buffers are made
    pack_bandwidth:          bytes per second at which a device packs what it sends in a move, and unpacks what it
                             receives; 0: that takes no time beside the links'
    """

    products: float = 0.5
    memory: float = 0.8
    links: float = 0.8
    layer_s: float = 250 * MICRO
    hop_s: float = 50 * MICRO
    micro_batches_per_stage: int = 4
    decode_groups_per_stage: int | None = None
    pool_share: float = 0.0
    switch_s: float = 0.0
    pack_bandwidth: float = 0.0


DEFAULT = Software()
"""Usual shares of large products on GPUs (0.45 to 0.6), and a layer's kernels launched one by one from Python."""


def _sxm(name: str, tflops: float, gib: int, terabytes_per_s: float, float32: float) -> Device:
    return Device(name, tflops * TERA, gib * GIB, terabytes_per_s * TERA, 5 * MICRO, float32 * TERA)


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _sxm("A100-40G", 312, 40, 1.555, 19.5),
        _sxm("A100-80G", 312, 80, 2.039, 19.5),
        _sxm("A800", 312, 80, 2.039, 19.5),
        _sxm("H100", 989, 80, 3.35, 67),
        _sxm("H800", 989, 80, 3.35, 67),
        _sxm("H200", 989, 141, 4.8, 67),
        _sxm("H20", 148, 96, 4.0, 44),
        _sxm("L40S", 362, 48, 0.864, 91.6),
        _sxm("RTX-4090", 165, 24, 1.008, 82.6),
    )
}
"""By name. Vendors' data sheets: dense bfloat16 (without sparsity), memory, memory bandwidth, float32 outside of tensor
cores. CPUs are not listed: they are measured."""

_KIND = re.compile(r"nvidia|geforce|tesla|sxm\d*|pcie|hbm\d\w*|\d+gb")
"""Words of a driver's name that do not tell one GPU from another: the maker, how it is plugged in, its memory."""
_SIZE = re.compile(r"-\d+G$")


def known_device(name: str, memory_bytes: int) -> Device | None:
    """The GPU of a driver's name (`NVIDIA A100-SXM4-80GB`), by all of its words; None: it is not listed.

    Args:
        memory_bytes: of those that differ in nothing else, the one whose memory is nearest.
    """
    words = [word for word in re.findall(r"\w+", name.lower()) if not _KIND.fullmatch(word)]
    same = [device for device in DEVICES.values() if re.findall(r"\w+", _SIZE.sub("", device.name).lower()) == words]
    return min(same, key=lambda device: abs(device.memory_bytes - memory_bytes), default=None)
