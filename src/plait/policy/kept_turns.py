"""Blocks of samples that have ended and may go on: until it is said that none does, their next turns find them."""

from __future__ import annotations

from plait.policy.blocks import Blocks, num_blocks_for
from plait.policy.step import Limits


class KeptTurns:
    """With what is held they take the room of as many samples as were here at once and may run at once, which these
    take anyway; the least recently used go first.

    Args:
        limits: of the scheduler that `blocks` belongs to.
    """

    def __init__(self, limits: Limits, blocks: Blocks) -> None:
        self._limits, self._blocks = limits, blocks
        self._num_samples, self._sample_blocks = 0, 0
        """Samples that were here at once, and blocks of one, at most."""

    @property
    def are_expected(self) -> bool:
        """Whether samples that have ended may go on."""
        return self._num_samples > 0

    def expect(self, num_samples: int, num_tokens: int) -> None:
        """Make room for samples that were added and may have a further turn.

        Args:
            num_samples: samples that are here now.
            num_tokens: upper bound of the tokens of the longest sample that was added.
        """
        self._num_samples = max(self._num_samples, num_samples)
        self._sample_blocks = max(self._sample_blocks, num_blocks_for(num_tokens, self._limits.block_tokens))
        room = min(self._num_samples, self._limits.max_running) * self._sample_blocks + self._limits.cache_blocks
        self._blocks.keep(self._blocks.num_blocks, within=min(room, self._blocks.num_blocks))

    def end(self) -> None:
        """No sample that has ended goes on."""
        self._num_samples, self._sample_blocks = 0, 0
        self._blocks.keep(self._limits.cache_blocks)
