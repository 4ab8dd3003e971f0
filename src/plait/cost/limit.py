"""How long a generation takes at least on a machine: bytes over its copy bandwidth, or FLOPs over its matrix rate.

Both rates are measured (`measured.rates`), in the dtype and with the threads of the generation. The work is that of an
ideal engine: prompts computed once, each sample's tokens once, no padding; weights, and keys and values of every
distinct context token, read once per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from plait.models.shape import ModelShape
from plait.training.memory import BYTES


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
    kv_bytes = 2 * shape.attending * shape.kv_heads * shape.head_dim * width
    mlp = shape.dense_layers * shape.mlp_matrices * shape.hidden * shape.intermediate
    shared = shape.expert_layers * shape.mlp_matrices * shape.hidden * shape.shared_intermediate
    expert = shape.expert_layers * shape.mlp_matrices * shape.hidden * shape.expert_intermediate
    """Weights of one expert in every layer that has them."""
    dense = shape.projections + mlp + shared
    head = shape.hidden * shape.vocabulary
    total = 0.0
    for step in steps:
        experts = min(shape.experts, step.tokens * shape.experts_per_token)
        read = (dense + experts * expert + head) * width + step.context * kv_bytes
        products = step.tokens * (dense + shape.experts_per_token * expert) + step.drawn * head
        products += 2 * step.attended * shape.attending * shape.heads * shape.head_dim
        total += max(read / rates.bytes_per_s, 2 * products / rates.flops_per_s)
    return total
