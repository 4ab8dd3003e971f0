"""This machine by name and by conservative numbers, where nothing was measured. Imports torch for CUDA alone."""

from __future__ import annotations

import os

from plait.cost.cluster import ClusterSpec
from plait.cost.hardware import Device, Link, Software, known_device
from plait.launch.machine import cpu_name
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
        asked: 0 takes what OMP_NUM_THREADS says, else one per core that this process may use.
    """
    return asked or int(os.environ.get("OMP_NUM_THREADS", "0")) or len(os.sched_getaffinity(0))


def conservative_cluster(device: str, devices: int) -> ClusterSpec:
    """So many devices of this machine by conservative numbers, nothing measured."""
    if device == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(0)
        known = known_device(properties.name, properties.total_memory)
        flops, bandwidth = (100e12, 1e12) if known is None else (known.flops, known.memory_bandwidth)
        gpu = Device(properties.name, flops, properties.total_memory, bandwidth)
        near = Link(50e9, 10e-6)
        return ClusterSpec(1, devices, gpu, near, near, Link(20e9, 10e-6), name="this machine")
    cores = os.cpu_count() or 1
    memory = limit().bytes // devices
    cpu = Device("cpu", 20e9 * cores / devices, memory, 8e9 / devices, 1e-6, 20e9 * cores / devices)
    link = Link(0.5e9, 200e-6)
    software = Software(products=0.5, memory=0.8, links=0.8, layer_s=300e-6, hop_s=400e-6)
    return ClusterSpec(1, devices, cpu, link, link, Link(4e9, 1e-5), name="this machine", software=software)
