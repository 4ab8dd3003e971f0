"""Keys and values: of prompts, held once per group, and of running samples, one contiguous slot each.

A slot holds the whole context of its sample, prompt included (a copy: decode then reads one view per layer). Slots and
their length grow by doubling. Buffers start as zeros: a masked place still enters a product, with weight 0, and what
lies there must be finite.

Shapes: S slots, L places of a slot, T tokens of a prefill, P of a prompt, Hkv key heads, D and E head sizes of keys and
of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from plait.data.packed import Span
from plait.policy import batching


@dataclass(frozen=True)
class KeyValue:
    """Of one layer: key [..., Hkv, tokens, D] and value [..., Hkv, tokens, E] in the compute dtype."""

    key: Tensor
    value: Tensor


PromptKV = dict[int, KeyValue]
"""Layer index → key [Hkv, P, D], value [Hkv, P, E]."""


class PrefillKV:
    """A `kv_sink` for PackedContext: keeps what a prefill computed until its prompts are cut out."""

    def __init__(self) -> None:
        self.layers: PromptKV = {}

    def __call__(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.layers[layer] = KeyValue(key, value)

    def prompt(self, span: Span) -> PromptKV:
        """Views of one prompt; they keep the whole prefill alive."""
        at = slice(span.start, span.stop)
        return {layer: KeyValue(kv.key[:, at], kv.value[:, at]) for layer, kv in self.layers.items()}


def owned(prompt: PromptKV) -> PromptKV:
    """A copy that keeps nothing else alive."""
    return {layer: KeyValue(kv.key.clone(), kv.value.clone()) for layer, kv in prompt.items()}


class SlotCache:
    """Slots of running samples; slot i belongs to row i of the batch.

    `layers` holds key [S, Hkv, L, D] and value [S, Hkv, L, E] of each layer; shapes are learned from the first prompt.
    """

    def __init__(self, max_slots: int) -> None:
        self.max_slots = max_slots
        self.num_slots = 0
        self.length = 0
        self.layers: dict[int, KeyValue] = {}

    @property
    def num_bytes(self) -> int:
        """Of all slots, used or not."""
        return sum(tensor.nbytes for kv in self.layers.values() for tensor in (kv.key, kv.value))

    def reserve(self, num_slots: int, length: int, max_length: int) -> None:
        """Grow so that `num_slots` slots of `length` tokens exist; doubling, `max_length` at most."""
        slots = batching.grown(self.num_slots, num_slots, self.max_slots)
        length = batching.grown(self.length, length, max(max_length, self.length))
        if (slots, length) == (self.num_slots, self.length):
            return
        for layer, old in self.layers.items():
            self.layers[layer] = KeyValue(_enlarged(old.key, slots, length), _enlarged(old.value, slots, length))
        self.num_slots, self.length = slots, length

    def write_prompt(self, first_slot: int, count: int, prompt: PromptKV) -> None:
        """Copy a prompt to the beginning of `count` adjacent slots. `reserve` has made room."""
        for layer, source in prompt.items():
            if layer not in self.layers:
                self.layers[layer] = KeyValue(self._zeros(source.key), self._zeros(source.value))
            target = self.layers[layer]
            num_tokens = source.key.shape[1]
            target.key[first_slot : first_slot + count, :, :num_tokens] = source.key
            target.value[first_slot : first_slot + count, :, :num_tokens] = source.value

    def move(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """Copy the first `length` places of each source slot to its target; sources and targets are disjoint."""
        for kv in self.layers.values():
            for tensor in (kv.key, kv.value):
                for source, target in moves:
                    tensor[target, :, :length] = tensor[source, :, :length]

    def clear(self) -> None:
        """Give the memory back."""
        self.layers.clear()
        self.num_slots = self.length = 0

    def _zeros(self, like: Tensor) -> Tensor:
        num_heads, _, head_size = like.shape
        return like.new_zeros(self.num_slots, num_heads, self.length, head_size)


def _enlarged(old: Tensor, num_slots: int, length: int) -> Tensor:
    new = old.new_zeros(num_slots, old.shape[1], length, old.shape[3])
    new[: old.shape[0], :, : old.shape[2]] = old
    return new
