"""The room that sequences take in the pool: which blocks they get, share, copy and give back.

Words as in `policy.batching`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from plait.policy.blocks import Blocks, num_blocks_for
from plait.policy.sequences import OLDEST, Order, Prompt, Sequences, Started, order_of
from plait.policy.step import Key, Limits


class Room:
    """The blocks of a pool, and how sequences come to theirs.

    Args:
        sequences: all that hold blocks.
    """

    def __init__(self, limits: Limits, sequences: Sequences) -> None:
        self.blocks = Blocks(limits.num_blocks, limits.cache_blocks)
        self._limits, self._sequences = limits, sequences

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens has room in the pool when it is alone."""
        return num_blocks_for(num_tokens, self._limits.block_tokens) <= self.blocks.num_blocks

    def num_shared(self, names: Sequence[Hashable]) -> int:
        """Tokens of a prompt that a sample of it would share with others here; `names` as of `Scheduler.add`."""
        return len(self.blocks.find(names)) * self._limits.block_tokens

    def bring(self, item: Started | Prompt, num_computed_tokens: int, *, is_current: bool) -> int | None:
        """Blocks for the computed tokens that a sample brings or shares; see `Scheduler.add_started`. Of a prompt all
        but the last are brought at most, as the logits of that one are asked for."""
        block_tokens, blocks = self._limits.block_tokens, self.blocks
        shared = blocks.find(item.names[: num_computed_tokens // block_tokens]) if is_current else []
        blocks.hold(shared)
        needed = num_blocks_for(item.num_tokens, block_tokens) - len(shared)  # it would give way at once with fewer
        if num_computed_tokens == 0 or blocks.num_free - needed < len(self._sequences.running):
            blocks.release(shared)
            return None
        goes_on = isinstance(item, Started) and num_computed_tokens == item.num_tokens - 1
        count = num_blocks_for(num_computed_tokens, block_tokens) - len(shared) if goes_on else needed
        item.table, item.is_current = shared + blocks.take(count), is_current
        item.num_computed_tokens = num_computed_tokens
        self.name(item, item.names)
        return len(shared) * block_tokens

    def may_bring(self, item: Started) -> bool:
        """Whether `bring` would give it blocks beside those that run, where it shares none."""
        needed = num_blocks_for(item.num_tokens, self._limits.block_tokens)
        return self.blocks.num_free - needed >= len(self._sequences.running)

    def may_admit(self, item: Started | Prompt, before: Iterable[Started | Prompt] = ()) -> bool:
        """Whether `admit` would give it blocks beside those that run; it may also where this is False, as blocks may be
        shared.

        Args:
            before: that are to get blocks first.
        """
        count = sum(num_blocks_for(one.num_tokens, self._limits.block_tokens) for one in (*before, item))
        return self.blocks.num_free - count > len(self._sequences.running)

    def admit(self, item: Started | Prompt, idle: bool) -> bool:
        """Give it blocks for all its tokens, if that leaves one for each running sample, or nothing else runs."""
        block_tokens, blocks = self._limits.block_tokens, self.blocks
        # The newest token is computed in any case: its logits are asked for.
        shared = blocks.find(item.names[: (item.num_tokens - 1) // block_tokens])
        blocks.hold(shared)
        count = num_blocks_for(item.num_tokens, block_tokens) - len(shared)
        spare = 0 if idle else len(self._sequences.running) + 1
        # Samples that have come from elsewhere stand ahead of prompts that are older.
        while idle and blocks.num_free < count and (self._evict_younger(item.order) or self._evict_younger(OLDEST)):
            pass
        if blocks.num_free - count < spare:
            assert not idle, f"{item.num_tokens} tokens do not fit into an empty pool"
            blocks.release(shared)
            return False
        item.table = shared + blocks.take(count)
        item.num_computed_tokens = len(shared) * block_tokens
        return True

    def has_room(self, samples: Iterable[Started], num_drafted: Mapping[Key, int]) -> bool:
        """Whether these running samples may compute their newest tokens with their drafts, and nobody gives way for
        it."""
        lacking = (self._num_lacking(sample, 1 + num_drafted.get(sample.key, 0)) for sample in samples)
        return sum(lacking) <= self.blocks.num_free

    def asking(self, samples: Iterable[Started], num_drafted: Mapping[Key, int]) -> list[Started]:
        """Those of these running samples whose new tokens may need blocks: the next of the table, or a copy of a shared
        one."""
        block_tokens, blocks = self._limits.block_tokens, self.blocks
        return [
            sample
            for sample in samples
            if sample.num_computed_tokens + (num_drafted.get(sample.key, 0) if num_drafted else 0)
            >= len(sample.table) * block_tokens
            or blocks.is_shared(sample.table[-1])
        ]

    def grow(self, sample: Started, num_new: int, preempted: list[Key]) -> list[tuple[int, int]] | None:
        """Blocks that a running sample may write so many new tokens to; younger ones give way where there are too few.

        Args:
            preempted: gets the samples that do, this one among them where it is the youngest.

        Returns:
            Blocks (source, target) to copy; None: its table stays as it was.
        """
        blocks, running = self.blocks, self._sequences.running
        while blocks.num_free < (lacking := self._num_lacking(sample, num_new)):
            if not self._evict_younger(sample.order):
                youngest = max(running.values(), key=order_of)
                self.preempt(youngest)
                preempted.append(youngest.key)
                if youngest is sample:
                    return None
        if not lacking:
            return None  # the others have taken copies, or given way
        if not self._needs_copy(sample):
            sample.table += blocks.take(lacking)
            return []
        source = sample.table.pop()
        sample.table += blocks.take(lacking)
        blocks.release((source,))
        return [(source, sample.table[-lacking])]

    def preempt(self, sample: Started) -> None:
        """A running sample gives its blocks up and waits."""
        self._sequences.preempt(sample)
        self.evict(sample)

    def evict(self, item: Started | Prompt) -> None:
        """Nothing of it is computed any more."""
        self.blocks.release(item.table)
        item.table, item.num_computed_tokens, item.is_current = [], 0, True

    def name(self, item: Started | Prompt, names: Sequence[Hashable]) -> None:
        """Others find its full blocks by these prefix keys, if what it holds is of the present weights: from now on,
        also in this step, as keys are written before they are read."""
        if item.is_current:
            full = item.num_computed_tokens // self._limits.block_tokens
            for block, name in zip(item.table[:full], names, strict=False):
                self.blocks.name(block, name)

    def _num_lacking(self, sample: Started, num_new: int) -> int:
        """Blocks that a running sample has to take, so that it may write so many tokens: behind its table, and a copy
        in place of the last one where that has room left and is shared."""
        size = self._limits.block_tokens
        growth = max(0, num_blocks_for(sample.num_computed_tokens + num_new, size) - len(sample.table))
        return growth + self._needs_copy(sample)

    def _needs_copy(self, sample: Started) -> bool:
        has_room = sample.num_computed_tokens < len(sample.table) * self._limits.block_tokens
        return has_room and self.blocks.is_shared(sample.table[-1])

    def _evict_younger(self, order: Order) -> bool:
        """Free the blocks of the youngest that waits, if it is younger; False where there is none."""
        youngest = self._sequences.youngest_waiting(order)
        if youngest is not None:
            self.evict(youngest)
        return youngest is not None
