"""How full an engine is: what a person is shown of it, and what tests hold it to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.generation.parking import Parking

if TYPE_CHECKING:
    from plait.generation.state import EngineState


class Occupancy:
    """
    Args:
        state, parking: of the engine.
    """

    def __init__(self, state: EngineState, parking: Parking) -> None:
        self._state, self._parking = state, parking

    @property
    def num_running(self) -> int:
        """Samples in the batch."""
        return len(self._state.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Samples that have not started, or wait to be computed again."""
        return self._state.scheduler.sequences.num_waiting

    @property
    def kv_bytes(self) -> int:
        """Memory of the pool, and of what is parked on its device."""
        return self._state.pool.num_bytes + self._parking.device_bytes

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """(tokens in blocks that somebody holds, tokens that the pool may hold)."""
        blocks, block_tokens = self._state.scheduler.blocks, self._state.pool.block_tokens
        return blocks.num_held * block_tokens, blocks.num_blocks * block_tokens
