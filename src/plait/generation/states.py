"""The states of recurrent layers of everything in flight, beside the keys and values of the layers that attend.

A sequence has one state per layer, behind its last token. It goes by the block that this token lies in, of which the
batching policy says all that has to be known: samples of one prompt share the block, and its state, until they write; a
block is copied before it is written to by one of several, and so is its state; who gives a block up gives up the state.
But states are large, and few blocks end a sequence: those that do have a *slot*, and lose it when slots are short and
no sequence ends there any more.

Shapes: S samples of a step, M columns of the block tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from plait.data.host_device import uploaded
from plait.generation.ragged import RaggedBatch
from plait.models.compute.recurrent import States

Grown = tuple[Sequence[int], int, int]
"""Block table of a sequence, its tokens computed so far, and those that a step computes."""


class StatePool:
    """Slots of all recurrent layers; the shapes of a layer's states are learned from its first ones.

    Args:
        block_tokens: of the pool of keys and values.
    """

    def __init__(self, block_tokens: int, device: torch.device) -> None:
        self.num_slots = 0
        self._block_tokens, self._device = block_tokens, device
        self._layers: dict[int, dict[tuple[str, int], Tensor]] = {}
        """[num_slots, …] each."""
        self._slots: dict[int, int] = {}
        """Block → its slot."""
        self._free: list[int] = []
        self._slots_N = torch.zeros(0, dtype=torch.int64, device=device)
        """The same on the device, by the block's id."""

    @property
    def num_bytes(self) -> int:
        return sum(state.nbytes for states in self._layers.values() for state in states.values())

    def expect(
        self, grown: Iterable[Grown], copies: Sequence[tuple[int, int]], held: Callable[[], Iterable[int]]
    ) -> None:
        """Have slots for the states behind a step, and copy those of copied blocks.

        Args:
            grown: all sequences that it computes.
            copies: blocks (source, target); no target is a source.
            held: says which blocks all sequences end in, those of the step behind it.
        """
        size = self._block_tokens
        ends = [table[(computed + count - 1) // size] for table, computed, count in grown]
        begins = {table[(computed - 1) // size] for table, computed, _ in grown if computed}
        missing = [block for block in dict.fromkeys((*ends, *(t for _, t in copies))) if block not in self._slots]
        if len(missing) > len(self._free):
            kept = {*ends, *begins, *held(), *(block for pair in copies for block in pair)}
            for block in [block for block in self._slots if block not in kept]:
                self._free.append(self._slots.pop(block))
            self._reserve(len(missing) - len(self._free))
        for block in missing:
            self._slots[block] = self._free.pop()
        self._upload(missing)
        if copies:
            slots = [(self._slots[source], self._slots[target]) for source, target in copies]
            sources, targets = uploaded(slots, torch.int64, self._device).unbind(1)
            for states in self._layers.values():
                for state in states.values():
                    state.index_copy_(0, targets, state.index_select(0, sources))

    def slot_of(self, block: int) -> int:
        """That of a block that a sequence ends in."""
        return self._slots[block]

    def slots_before(self, batch: RaggedBatch) -> Tensor:
        """[S] int64: slots of the states that the sequences of a step begin with; anything where they have none."""
        return self._slots_behind(batch, batch.held_S)

    def slots_behind(self, batch: RaggedBatch) -> Tensor:
        """[S] int64: slots of the states that they end with."""
        starts_S1 = batch.starts_S1
        return self._slots_behind(batch, batch.held_S + starts_S1[1:] - starts_S1[:-1])

    def _slots_behind(self, batch: RaggedBatch, tokens_S: Tensor) -> Tensor:
        columns_S1 = ((tokens_S.long() - 1).clamp(min=0) // self._block_tokens)[:, None]
        return self._slots_N[batch.tables_SM.gather(1, columns_S1)[:, 0].long()]

    def read(self, layer: int, slots_S: Tensor) -> States:
        """Copies [S, …] of states."""
        return {key: state.index_select(0, slots_S) for key, state in self._layers[layer].items()}

    def write(self, layer: int, slots_S: Tensor, states: States) -> None:
        """Put states [S, …] where they belong."""
        if layer not in self._layers:
            self._layers[layer] = {key: new.new_zeros(self.num_slots, *new.shape[1:]) for key, new in states.items()}
        for key, state in self._layers[layer].items():
            state.index_copy_(0, slots_S, states[key].to(state.dtype))

    def clear(self) -> None:
        """Hold nothing, and give the memory back."""
        self.num_slots = 0
        self._layers.clear()
        self._slots.clear()
        self._free.clear()

    def _reserve(self, count: int) -> None:
        """So many slots more at least; they grow by half."""
        if count <= 0:
            return
        count = max(count, self.num_slots // 2)
        self._free += reversed(range(self.num_slots, self.num_slots + count))
        self.num_slots += count
        for states in self._layers.values():
            for key, old in states.items():
                states[key] = torch.cat([old, old.new_zeros(count, *old.shape[1:])])

    def _upload(self, blocks: Sequence[int]) -> None:
        if not blocks:
            return
        if (lacking := max(blocks) + 1 - len(self._slots_N)) > 0:
            more = self._slots_N.new_zeros(max(lacking, len(self._slots_N)))
            self._slots_N = torch.cat([self._slots_N, more])
        pairs = [(block, self._slots[block]) for block in blocks]
        blocks_N, slots_N = uploaded(pairs, torch.int64, self._device).unbind(1)
        self._slots_N[blocks_N] = slots_N
