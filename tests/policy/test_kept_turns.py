"""How long, and in how much room, blocks of samples stay that have ended and may go on."""

from __future__ import annotations

from plait.policy.blocks import Blocks
from plait.policy.kept_turns import KeptTurns
from plait.policy.step import Limits


def test_they_stay_in_the_room_of_those_that_were_here_until_none_goes_on() -> None:
    limits = Limits(max_running=3, max_prefill_tokens=64, num_blocks=40, cache_blocks=1)
    blocks = Blocks(limits.num_blocks, limits.cache_blocks)
    turns = KeptTurns(limits, blocks)
    assert not turns.are_expected
    turns.expect(1, 33)
    turns.expect(2, 48)
    turns.expect(2, 20)
    assert turns.are_expected

    def ended(count: int, name: str) -> None:
        """Samples of three full blocks each, which leave one after the other."""
        for number in range(count):
            table = blocks.take(3)
            for place, block in enumerate(table):
                blocks.name(block, (name, number, place))
            blocks.release(table)

    ended(4, "two were here at once, of 48 tokens at most, beside one block that stays in any case")
    assert (blocks.num_touched, blocks.num_cached) == (2 * 3 + 1, 2 * 3 + 1)
    turns.expect(9, 20)
    ended(4, "three of nine may run at once")
    assert blocks.num_touched == 3 * 3 + 1
    turns.end()
    assert not turns.are_expected
    assert (blocks.num_cached, blocks.num_free) == (1, 40)
