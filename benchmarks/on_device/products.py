"""How fast a decode step's products read their weights: by cuBLAS, as plait calls it, and by what might take its place.

The products are those of one layer, joined as generation joins them, and of the head, for 1 to 256 rows. Each is
computed by turns with several copies of its weights, so many that no cache holds them, in a CUDA graph: what is timed
are products one behind another, as in a replayed step. What it comes to in a step: all layers' and the head's.

    cublas      `torch.nn.functional.linear`, as the engine calls it; on a CPU it is called linear
    cublaslt    the same, with cuBLASLt's choice of a kernel
    split       a plain Triton product of this benchmark's own, its input features dealt out to several programs
    inductor    torch.compile: the best of its Triton templates; of one row a reduction that it tunes

Until time is up, the ways in this order: what takes long to compile comes last. A way that cannot compute a product, or
says something else than the first one, is said and not timed.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from on_device.job import SHAPES, Job, Rates, Shape, rates_of

ROWS = ((1, 64), (8, 256))
"""Samples of a step: those of all products first, then these, in case that time is up."""
CACHES = 4
"""Times what a cache holds that the copies of a weight have together."""
LEAST_S = 0.01
"""Seconds of replays that are timed together."""
TURNS = 3
FAR = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of a product, as a share of its norm: what two ways may be apart by."""
SPARE_S = 8.0
"""Left at the end for a product that is begun, and for what is said in all."""
MOST_S = 50.0
"""However much time there is: it is of more use for other parts."""

Way = Callable[[Tensor, Tensor], Tensor]
"""Rows [T, I] by a weight [O, I]: [T, O]."""
WaysOf = Callable[[int], Sequence[Way]]
"""For so many rows, of which the fastest counts."""
Seconds = defaultdict[tuple[str, int, str], dict[str, float]]
"""(way, rows, shape) → product → seconds of one."""


@dataclass(frozen=True)
class Product:
    """name: of the weight [outputs, inputs]; times: that a step computes it"""

    shape: str
    name: str
    outputs: int
    inputs: int
    times: int

    def num_bytes(self, dtype: torch.dtype) -> int:
        return self.outputs * self.inputs * dtype.itemsize


def main() -> int:
    job = Job.read()
    rates = rates_of(job)
    print(rates)
    job.record("products", "", **asdict(rates))
    products, ends = products_of(job.shapes), min(job.ends, time.time() + MOST_S)
    works = [(rows, product) for some in rows_of(job) for product in products for rows in some]
    seconds: Seconds = defaultdict(dict)
    for name, ways in ways_of(job).items():
        for number, (rows, product) in enumerate(works):
            if time.time() > ends - SPARE_S:
                print(f"{name}: {len(works) - number} of {len(works)} products left out, time is up", flush=True)
                break
            found = measure(job, rates, name, ways(rows), rows, product)
            if found is not None:
                seconds[name, rows, product.shape][product.name] = found
        in_steps(job, rates, name, seconds)
    in_steps(job, rates, "fastest", with_fastest(seconds))
    return 0


def rows_of(job: Job) -> tuple[tuple[int, ...], ...]:
    return ROWS[:1] if job.is_tiny else ROWS


def products_of(shapes: Sequence[str]) -> list[Product]:
    """Of the largest shape first, and of each what reads most in a step."""
    found = [product for shape in shapes for product in _of_shape(shape, SHAPES[shape])]
    numbers = lambda one: one.times * one.outputs * one.inputs
    sizes = {shape: sum(numbers(one) for one in found if one.shape == shape) for shape in shapes}
    return sorted(found, key=lambda one: (-sizes[one.shape], -numbers(one)))


def _of_shape(name: str, of: Shape) -> Iterator[Product]:
    head = of.hidden // of.heads
    yield Product(name, "qkv", (of.heads + 2 * of.kv_heads) * head, of.hidden, of.layers)
    yield Product(name, "o", of.hidden, of.heads * head, of.layers)
    yield Product(name, "gate_up", 2 * of.intermediate, of.hidden, of.layers)
    yield Product(name, "down", of.hidden, of.intermediate, of.layers)
    yield Product(name, "head", of.vocabulary, of.hidden, 1)


def ways_of(job: Job) -> dict[str, WaysOf]:
    """By name, those that there are."""
    is_gpu = job.device == "cuda"
    found: dict[str, WaysOf] = {"cublas" if is_gpu else "linear": lambda rows: [F.linear]}
    if is_gpu:
        found["cublaslt"] = lambda rows: [by_cublaslt]
    if find_spec("triton") is not None:
        from on_device import split_product

        if is_gpu or split_product.INTERPRETED:
            found["split"] = split_product.ways
    if is_gpu:
        found["inductor"] = lambda rows: [by_inductor(rows)]
    return found


def by_cublaslt(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        return F.linear(x_TI, weight_OI)
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def by_inductor(rows: int) -> Way:
    """Compiled anew for each product: torch keeps eight kinds of one function, and computes the ninth uncompiled."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON"}
    if rows == 1:
        options = {"coordinate_descent_tuning": True}  # then torch writes it as a sum of products
    return torch.compile(_linear, dynamic=False, fullgraph=True, options=options)


def _linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return F.linear(x_TI, weight_OI)


@torch.inference_mode()
def measure(job: Job, rates: Rates, name: str, ways: Sequence[Way], rows: int, product: Product) -> float | None:
    """Seconds of a product by the fastest of some ways; None: none computes it."""
    dtype = getattr(torch, job.dtype)
    num_bytes = product.num_bytes(dtype)
    copies = 1 if job.device == "cpu" else max(2, ceil(CACHES * _cache_bytes() / num_bytes))
    torch.manual_seed(0)
    weights = torch.randn(copies, product.outputs, product.inputs, dtype=dtype, device=job.device)
    x_TI = torch.randn(rows, product.inputs, dtype=dtype, device=job.device)
    expected, taken = F.linear(x_TI, weights[-1]).float(), []
    for way in ways:
        try:
            off = float((way(x_TI, weights[-1]).float() - expected).norm() / expected.norm())
            if not off <= FAR[dtype]:
                raise ValueError(f"is {off:.2g} of its size off")
            taken.append(seconds_of(way, x_TI, weights))
        except Exception as error:  # torch's compiler, and Triton's, may raise anything
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            print(f"{product.shape} {product.name}, {rows} rows, {name}: {why}", flush=True)
            job.record("products", product.shape, product=product.name, rows=rows, way=name, refused=why)
    if not taken:
        return None
    best_s = min(taken)
    share = num_bytes / best_s / rates.best_bytes_per_s
    cells = f"{best_s * 1e6:>9.1f} us {num_bytes / best_s / 1e9:>7.0f} GB/s {share:>7.1%}"
    print(f"{product.shape:>5} {product.name:<8} {rows:>4} rows {name:<9} {cells}", flush=True)
    what = {"product": product.name, "rows": rows, "way": name, "weight_bytes": num_bytes}
    job.record("products", product.shape, **what, seconds=best_s, share=share, all_ways_s=taken)
    return best_s


def _cache_bytes() -> int:
    return torch.cuda.get_device_properties(0).L2_cache_size


def seconds_of(way: Way, x_TI: Tensor, weights: Tensor) -> float:
    """Of one product, as all copies of its weight take in turn; the shortest of some turns."""

    def each() -> Tensor:
        out = x_TI
        for weight_OI in weights:
            out = way(x_TI, weight_OI)
        return out

    if x_TI.device.type == "cpu":
        began = time.perf_counter()
        each()
        return (time.perf_counter() - began) / len(weights)
    from plait.generation.cuda_graphs import by_cuda

    graph, _ = by_cuda(each, None, first=lambda no_waits: each())
    once_s = _replays_s(graph, 1)
    times = max(1, ceil(LEAST_S / max(once_s, 1e-6)))
    return min(_replays_s(graph, times) for _ in range(TURNS)) / times / len(weights)


def _replays_s(graph: Any, times: int) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(times):
        graph.replay()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def with_fastest(seconds: Seconds) -> Seconds:
    """The shortest of all ways."""
    found: Seconds = defaultdict(dict)
    for (_, rows, shape), by_product in seconds.items():
        fastest = found["fastest", rows, shape]
        for product, taken in by_product.items():
            fastest[product] = min(taken, fastest.get(product, taken))
    return found


def in_steps(job: Job, rates: Rates, way: str, seconds: Seconds) -> None:
    """What the products of a step come to, where a way has computed all of them."""
    dtype = getattr(torch, job.dtype)
    for shape in job.shapes:
        products = products_of([shape])
        total_bytes = sum(one.times * one.num_bytes(dtype) for one in products)
        for rows in (rows for some in rows_of(job) for rows in some):
            found = seconds[way, rows, shape]
            if len(found) < len(products):
                continue
            step_s = sum(one.times * found[one.name] for one in products)
            share = total_bytes / step_s / rates.best_bytes_per_s
            cells = f"{step_s * 1e3:>8.3f} ms {share:>7.1%}"
            print(f"{shape:>5} products of a step of {rows:>4} rows {way:<9} {cells}", flush=True)
            job.record("products", shape, rows=rows, way=way, step_s=step_s, share=share)


if __name__ == "__main__":
    sys.exit(main())
