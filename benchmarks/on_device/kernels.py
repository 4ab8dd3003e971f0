"""Which kernels a step's time on a device goes to, by torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from on_device.job import Job

LISTED, RECORDED = 12, 60
"""Kernels that are printed, and such that are written with the results."""


def profiled(device: str) -> torch.profiler.profile:
    """A profiler of a device; of a CPU, of the operators of torch."""
    kind = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[kind.CUDA if device == "cuda" else kind.CPU])


def say_kernels(
    job: Job,
    part: str,
    shape: str,
    title: str,
    profiler: torch.profiler.profile,
    step_s: float,
    steps: int,
    **of: object,
) -> None:
    """Say and record what a step took by the clock and by its kernels, and those that took most of it: what it takes
    beyond its kernels, the device waits for the host, or from one kernel to the next.

    Args:
        steps: which the profiler has seen.
        of: what the record says beside.
    """
    found = sorted(kernels_of(profiler, job.device, steps), reverse=True)
    busy_s = sum(seconds for seconds, _, _ in found)
    print(f"{title}, profiled: a step {step_s * 1e3:.3f} ms, kernels {busy_s * 1e3:.3f}, most of them:")
    for seconds, count, name in found[:LISTED]:
        print(f"{seconds * 1e3:>9.3f} ms {count:>6.1f} of {name[:90]}")
    kernels = [{"name": name[:160], "seconds": seconds, "count": count} for seconds, count, name in found[:RECORDED]]
    job.record(part, shape, **of, profiled_s=step_s, busy_s=busy_s, kernels=kernels)


def kernels_of(profiler: torch.profiler.profile, device: str, steps: int) -> Iterator[tuple[float, float, str]]:
    """Seconds in a step, number in a step, name."""
    for one in profiler.key_averages():
        microseconds = one.self_device_time_total if device == "cuda" else one.self_cpu_time_total
        if microseconds > 0:
            yield microseconds / 1e6 / steps, one.count / steps, one.key
