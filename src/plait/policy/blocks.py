"""Blocks of the pool of keys and values: who holds which, in numbers. Pure bookkeeping without torch."""

BLOCK_TOKENS = 16
