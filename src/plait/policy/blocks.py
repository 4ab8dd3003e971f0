"""Blocks of the pool of keys and values: which are free, who shares one, which prefixes are held. Numbers, no tensors.

A sequence holds a *block table*, the ids of its blocks in order. Sequences with equal beginnings share the full blocks
of it; a block that several hold is read only, and who wants to write takes a copy. Blocks with a *prefix key* (what the
context up to their end says) are found by later sequences; up to `cache_blocks` of them stay when nobody holds them any
more, the least recently used go first (`keep` changes how many). Everything is a function of the calls so far.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence

BLOCK_TOKENS = 16
"""Tokens of a block: at most so many less one are wasted per sample, and copies of a shared block stay small."""

UNLIMITED = 1 << 62


def num_blocks_for(num_tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_tokens)


def prefix_keys(token_ids: Sequence[int], block_tokens: int = BLOCK_TOKENS) -> tuple[bytes, ...]:
    """A key for each full block of a context: a digest of all tokens up to its end."""
    keys: list[bytes] = []
    digest = b""
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        tokens = b"".join(token_id.to_bytes(8, "little") for token_id in token_ids[start : start + block_tokens])
        digest = hashlib.blake2b(digest + tokens, digest_size=16).digest()
        keys.append(digest)
    return tuple(keys)


class Blocks:
    """Ids 0 … num_blocks − 1, counted by how many hold each.

    Args:
        num_blocks: None: as many as are asked for.
        cache_blocks: blocks with a prefix key that may stay when nobody holds them.
    """

    def __init__(self, num_blocks: int | None, cache_blocks: int = 0) -> None:
        self.num_blocks = UNLIMITED if num_blocks is None else num_blocks
        self.cache_blocks = cache_blocks
        self._within = self.num_blocks
        """Ids up to this one are given out before cached blocks go."""
        self.num_touched = 0
        """Ids below it have been given out; those from it on never."""
        self._free: list[int] = []
        self._holders: list[int] = []
        """How many hold each touched id."""
        self._key_of: dict[int, Hashable] = {}
        self._by_key: dict[Hashable, int] = {}
        self._cached: dict[int, None] = {}
        """Held by nobody, with a key; the least recently used first."""

    @property
    def num_free(self) -> int:
        """Blocks that `take` can give, cached ones among them."""
        return len(self._free) + len(self._cached) + self.num_blocks - self.num_touched

    @property
    def num_cached(self) -> int:
        """Blocks held by nobody whose prefix would be found."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        return self.num_touched - len(self._free) - len(self._cached)

    def keep(self, cache_blocks: int, within: int | None = None) -> None:
        """From now on so many blocks with a prefix key may stay when nobody holds them.

        Args:
            within: so many blocks are touched before cached ones go; None: all that there are.
        """
        self.cache_blocks, self._within = cache_blocks, self.num_blocks if within is None else within
        while len(self._cached) > cache_blocks:
            self._evict(next(iter(self._cached)))

    def is_shared(self, block: int) -> bool:
        """Whether several hold it."""
        return self._holders[block] > 1

    def take(self, count: int) -> list[int]:
        """Blocks of one's own; what lies in them is undefined."""
        assert count <= self.num_free, f"{count} blocks asked, {self.num_free} free"
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        elif self.num_touched < (self._within if self._cached else self.num_blocks):
            block = self.num_touched
            self.num_touched += 1
            self._holders.append(0)
        else:
            block = next(iter(self._cached))
            self._evict(block)
            self._free.pop()
        self._holders[block] = 1
        return block

    def hold(self, table: Iterable[int]) -> None:
        """One more holder of each block; cached ones count as held again."""
        for block in table:
            if self._holders[block] == 0:
                del self._cached[block]
            self._holders[block] += 1

    def release(self, table: Sequence[int]) -> None:
        """One holder less of each; blocks without any are free, or stay cached where they have a key."""
        for block in reversed(table):  # the ends of prefixes are given up first
            self._holders[block] -= 1
            assert self._holders[block] >= 0, f"block {block} is released by more than held it"
            if self._holders[block]:
                continue
            if block not in self._key_of:
                self._free.append(block)
            elif self.cache_blocks == 0:
                self._forget(block)
                self._free.append(block)
            else:
                self._cached[block] = None
                if len(self._cached) > self.cache_blocks:
                    self._evict(next(iter(self._cached)))

    def find(self, keys: Iterable[Hashable]) -> list[int]:
        """The blocks of the longest beginning of `keys` that is here. `hold` them before anything else."""
        blocks = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def name(self, block: int, key: Hashable) -> None:
        """From now on the block is found by this key, if no other is; its tokens are computed."""
        if key not in self._by_key and block not in self._key_of:
            self._by_key[key] = block
            self._key_of[block] = key

    def forget(self) -> None:
        """No block is found by its prefix any more, and none stays cached."""
        self._free += reversed(self._cached)
        self._cached.clear()
        self._key_of.clear()
        self._by_key.clear()

    def _evict(self, block: int) -> None:
        del self._cached[block]
        self._forget(block)
        self._free.append(block)

    def _forget(self, block: int) -> None:
        del self._by_key[self._key_of.pop(block)]
