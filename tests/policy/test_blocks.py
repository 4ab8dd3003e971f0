"""Block accounting: by hand, and against a plain table of who holds what."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plait.policy.blocks import Blocks, num_blocks_for, prefix_keys
from tests.cases import examples


def test_by_hand() -> None:
    blocks = Blocks(4, cache_blocks=1)
    first = blocks.take(2)
    assert first == [0, 1]
    blocks.hold(first)
    blocks.name(0, "a")
    blocks.name(1, "b")
    blocks.name(1, "other")  # a block has one name
    assert blocks.find(["a", "b", "c"]) == [0, 1]
    assert blocks.find(["b"]) == [1]
    assert blocks.find(["other"]) == []
    assert (blocks.num_free, blocks.num_held, blocks.num_touched) == (2, 2, 2)
    assert blocks.is_shared(0)
    blocks.release(first)
    assert not blocks.is_shared(0)
    blocks.release(first)  # one of them may stay: the beginning of the prefix
    assert blocks.find(["a", "b"]) == [0]
    assert (blocks.num_free, blocks.num_held, blocks.num_cached) == (4, 0, 1)
    blocks.hold([0])
    assert (blocks.num_free, blocks.num_cached) == (3, 0)
    blocks.release([0])
    assert sorted(blocks.take(4)) == [0, 1, 2, 3], "a cached block is given away when nothing else is left"
    assert blocks.find(["a"]) == []
    with pytest.raises(AssertionError, match="1 blocks asked, 0 free"):
        blocks.take(1)
    with pytest.raises(AssertionError, match="released by more"):
        blocks.release([2, 2])


def test_how_many_stay_may_change_and_how_many_are_touched_before_they_go() -> None:
    blocks = Blocks(8)
    blocks.keep(8, within=4)
    held = blocks.take(3)
    for block, key in zip(held, "abc", strict=True):
        blocks.name(block, key)
    blocks.release(held)
    assert (blocks.num_cached, blocks.num_free) == (3, 8)
    assert blocks.take(1) == [3], "there is room within 4"
    assert (blocks.take(2), blocks.find("a"), blocks.find("b")) == ([2, 1], [0], []), "the ends of prefixes go first"
    assert blocks.take(2) == [0, 4], "when nothing is cached, there are others"
    blocks.name(3, "d")
    blocks.release([3])
    blocks.keep(0)
    assert (blocks.num_cached, blocks.find("d"), blocks.take(4)) == (0, [], [3, 5, 6, 7])


def test_a_pool_without_a_limit() -> None:
    blocks = Blocks(None)
    assert len(set(blocks.take(1000))) == 1000
    assert num_blocks_for(33, 16) == 3


def test_prefix_keys_say_all_that_stands_before() -> None:
    one, two = prefix_keys(range(40), 16), prefix_keys([*range(16), 99, *range(17, 40)], 16)
    assert len(one) == len(two) == 2
    assert one[0] == two[0]
    assert one[1] != two[1]
    assert prefix_keys([1, 2, 3, 1, 2, 3], 3)[0] != prefix_keys([1, 2, 3, 1, 2, 3], 3)[1]
    assert prefix_keys([1] * 15, 16) == ()


class Holders(RuleBasedStateMachine):
    """Any calls: blocks are conserved, nobody's block is given to another, the index finds what was named."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks(12, cache_blocks=3)
        self.tables: list[list[int]] = []
        self.names: dict[int, str] = {}
        self.count = 0

    @precondition(lambda self: self.blocks.num_free)
    @rule(count=st.integers(1, 5))
    def take(self, count: int) -> None:
        held = {block for table in self.tables for block in table}
        taken = self.blocks.take(min(count, self.blocks.num_free))
        assert len(set(taken)) == len(taken)
        assert not held & set(taken)
        for block in taken:
            self.names.pop(block, None)
        self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.blocks.hold(table)
        self.tables.append(list(table))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data) -> None:
        self.blocks.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def name(self, data) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.tables))))
        self.count += 1
        self.blocks.name(block, f"name {self.count}")
        self.names.setdefault(block, f"name {self.count}")

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def find(self, data) -> None:
        block = data.draw(st.sampled_from(sorted(self.names)))
        found = self.blocks.find([self.names[block]])
        held = any(block in table for table in self.tables)
        assert found in ([[block]] if held else [[block], []])
        if found:
            self.blocks.hold(found)
            self.tables.append(found)

    @rule()
    def forget(self) -> None:
        self.blocks.forget()
        self.names.clear()

    @invariant()
    def conserved(self) -> None:
        held = {block for table in self.tables for block in table}
        assert self.blocks.num_held == len(held)
        assert self.blocks.num_free == 12 - len(held)
        assert self.blocks.num_cached <= 3
        for block in held:
            assert self.blocks.is_shared(block) == (sum(block in table for table in self.tables) > 1)


Holders.TestCase.settings = settings(max_examples=examples(25, 60), stateful_step_count=40, deadline=None)
TestHolders = Holders.TestCase
