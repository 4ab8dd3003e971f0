"""How long a generation takes at least on a machine: bytes over its copy bandwidth, or FLOPs over its matrix rate.

Both rates are measured here and now, in the dtype and with the threads of the generation. The work is that of an ideal
engine: prompts computed once, each sample's tokens once, no padding; weights, and keys and values of every distinct
context token, read once per step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from plait.models.shape import ModelShape
from plait.training.memory import BYTES

COPIED_BYTES = 128 << 20
"""Several times what a cache holds."""
MATRIX_SIZE = {"cpu": 1024, "cuda": 4096}
"""Rows and columns of a product that runs at the highest rate."""
REPEATS = 5


@dataclass(frozen=True)
class MachineRates:
    bytes_per_s: float
    """Rate of a copy, read and written bytes both counted."""
    flops_per_s: float
    """Rate of a large matrix product; a multiplication and an addition are two."""


@dataclass(frozen=True)
class IdealStep:
    """What one step of an ideal engine does."""

    tokens: int
    """That go through the model."""
    drawn: int
    """Rows that pass the head."""
    attended: int
    """Pairs of a query and a key, of one head."""
    context: int
    """Distinct tokens whose keys and values are read or written; a prompt's once for all of its samples."""


def ideal_steps(groups: Sequence[tuple[int, Sequence[int]]], max_running: int) -> Iterator[IdealStep]:
    """Steps of continuous batching without limits but `max_running`.

    Args:
        groups: of each prompt its tokens, and the response tokens of its samples.
    """
    waiting = [(prompt, length, group) for group, (prompt, lengths) in enumerate(groups) for length in lengths]
    waiting.reverse()
    seen: set[int] = set()
    running: list[tuple[int, int, int, int]] = []
    """(prompt tokens, tokens said, length, group)."""
    while waiting or running:
        tokens = drawn = attended = context = 0
        here: set[int] = set()
        going = []
        for prompt, said, length, group in running:
            tokens, drawn, attended, context = tokens + 1, drawn + 1, attended + prompt + said, context + said
            context += 0 if group in here else prompt
            here.add(group)
            going.append((prompt, said + 1, length, group))
        while waiting and len(going) < max_running:
            prompt, length, group = waiting.pop()
            drawn += 1
            if group not in seen:
                seen.add(group)
                tokens, attended = tokens + prompt, attended + prompt * (prompt + 1) // 2
                context += prompt
                here.add(group)
            going.append((prompt, 1, length, group))
        running = [sample for sample in going if sample[1] < sample[2]]
        yield IdealStep(tokens, drawn, attended, context)


def limit_seconds(shape: ModelShape, dtype: str, steps: Iterable[IdealStep], rates: MachineRates) -> float:
    """Seconds below which no engine gets: of each step the larger of its two times, since the next needs its tokens."""
    width = BYTES[dtype]
    kv_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * width
    mlp = (shape.layers - shape.expert_layers) * 3 * shape.hidden * shape.intermediate
    shared = shape.expert_layers * 3 * shape.hidden * shape.shared_intermediate
    expert = shape.expert_layers * 3 * shape.hidden * shape.expert_intermediate
    """Weights of one expert in every layer that has them."""
    dense = shape.layers * shape.attention_parameters + mlp + shared
    head = shape.hidden * shape.vocabulary
    total = 0.0
    for step in steps:
        experts = min(shape.experts, step.tokens * shape.experts_per_token)
        read = (dense + experts * expert + head) * width + step.context * kv_bytes
        products = step.tokens * (dense + shape.experts_per_token * expert) + step.drawn * head
        products += 2 * step.attended * shape.layers * shape.heads * shape.head_dim
        total += max(read / rates.bytes_per_s, 2 * products / rates.flops_per_s)
    return total


def measure_rates(dtype: str, device: str = "cpu") -> MachineRates:
    """The machine's rates with the threads of this process; a second or less, and 256 MiB."""
    return MachineRates(_copy_rate(device), _matrix_rate(dtype, device))


def _copy_rate(device: str) -> float:
    import torch

    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / _fastest(lambda: target.copy_(source), device)


def _matrix_rate(dtype: str, device: str) -> float:
    import torch

    from plait.models.compute import cpu_linear

    size = MATRIX_SIZE[device]
    left, right = (torch.ones(size, size, dtype=getattr(torch, dtype), device=device) for _ in range(2))
    with torch.inference_mode():
        seconds = [_fastest(work, device) for work in (lambda: left @ right, lambda: cpu_linear.linear(left, right))]
    return 2 * size**3 / min(seconds)


def _fastest(work: Callable[[], object], device: str) -> float:
    import torch

    times = []
    for _ in range(1 + REPEATS):  # the first warms up
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])
