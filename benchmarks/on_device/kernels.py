"""Which kernels a step's time on a device goes to, by torch's profiler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from on_device.job import Job

LISTED, RECORDED = 12, 60
"""Kernels that are printed, and such that are written with the results."""
CATEGORIES: Mapping[str, Sequence[str]] = {
    "attention": ("flash", "fmha", "sdpa", "attention", "attn", "flex", "_merge"),
    "laying out keys": ("gather.", "fold."),
    "products": ("gemm", "gemv", "cutlass", "nvjet", "xmma", "cublas", "splitk", "::mm", "addmm", "bmm", "::linear"),
    "norms and gates": ("rms_norm", "swiglu", "geglu", "layer_norm", "silu"),
    "rotations": ("rotate", "rotary"),
    "log-probs": ("logprobs", "softmax", "logsumexp"),
    "optimizer": ("adam", "multi_tensor", "lpnorm", "foreach"),
    "reading and adding rows": ("index", "embedding", "scatter", "gather"),
    "copies and zeros": ("memcpy", "memset", "copy", "fill", "cat", "zero"),
    "sums": ("functor_add", "functoronself_add", "::add"),
    "reductions": ("reduce", "::sum", "norm"),
    "other numbers by themselves": ("elementwise", "::mul", "::div", "::exp", "triton_poi"),
}
"""Kind of work → what stands in the names of its kernels, in small letters. The first that fits counts. Of sums those
of gradients are most. Products of the head are among the products."""
OTHERS = "others"


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
    by_category = categories_of((seconds, name) for seconds, _, name in found)
    between_s = max(0.0, step_s - busy_s)
    for category, seconds in (*by_category.items(), ("between kernels", between_s)):
        print(f"{seconds * 1e3:>9.3f} ms {seconds / step_s:>6.1%} {category}")
    kernels = [{"name": name[:160], "seconds": seconds, "count": count} for seconds, count, name in found[:RECORDED]]
    job.record(part, shape, **of, profiled_s=step_s, busy_s=busy_s, categories=by_category, kernels=kernels)


def categories_of(kernels: Iterable[tuple[float, str]]) -> dict[str, float]:
    """Seconds by kind of work, of (seconds, name) of kernels: the largest first, what has no known name last."""
    found: dict[str, float] = {}
    for seconds, name in kernels:
        low = f"{name.lower()}."
        kind = next((kind for kind, parts in CATEGORIES.items() if any(part in low for part in parts)), OTHERS)
        found[kind] = found.get(kind, 0.0) + seconds
    return dict(sorted(found.items(), key=lambda one: (one[0] == OTHERS, -one[1])))


def kernels_of(profiler: torch.profiler.profile, device: str, steps: int) -> Iterator[tuple[float, float, str]]:
    """Seconds in a step, number in a step, name."""
    for one in profiler.key_averages():
        microseconds = one.self_device_time_total if device == "cuda" else one.self_cpu_time_total
        if microseconds > 0:
            yield microseconds / 1e6 / steps, one.count / steps, one.key
