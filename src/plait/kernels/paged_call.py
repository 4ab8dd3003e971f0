"""What is asked of attention over blocks: one value for every kernel and for the plain twin.

Shapes: T new tokens, S samples, M columns of the block tables, N blocks of P tokens, Hq query heads, Hkv key heads, D
and E head sizes of keys and of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedCall:
    """Each new token over the held tokens of its sample and those new ones that it sees."""

    query: Tensor
    """[T, Hq, D], rope applied."""
    key_pool: Tensor
    """[N, Hkv, P, D], the new tokens' included."""
    value_pool: Tensor
    """[N, Hkv, P, E]."""
    tables_SM: Tensor
    """int32, block ids, −1 behind them."""
    starts_S1: Tensor
    """int32 [S + 1], first row of each sample."""
    held_S: Tensor
    """int32, tokens that the pool held before."""
    ancestors: Sequence[Tensor | None] | None = None
    """Per sample a bool [k, k], row i sees new token j; None: a causal chain."""
    _: KW_ONLY
    scale: float
    window: int | None = None
    """A token sees itself and the window − 1 positions before it; None: all before it."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """softcap, sinks: see AttentionContext.attend."""
    lengths: tuple[int, int] | None = None
    """Most new tokens, and most keys with the new ones, that a sample has; None: the tensors say (a GPU is waited for
    then)."""

    def most(self) -> tuple[int, int]:
        """`lengths`, read from the tensors where they are not given."""
        if self.lengths is not None:
            return self.lengths
        counts_S = self.starts_S1[1:] - self.starts_S1[:-1]
        return int(counts_S.max()), int((self.held_S + counts_S).max())
