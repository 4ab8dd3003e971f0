"""Moves between real processes: every element where it has to be, every byte as planned."""

from __future__ import annotations

import re

import pytest
import torch

from plait.launch.group import Group
from plait.layout.mesh import Cluster, Layout
from plait.reallocation.mover import AHEAD
from tests.layout.uniform_caches import uniform
from tests.reallocation.live_memory import LiveMemory
from tests.reallocation.worker import Outcome, layouts_of

DEADLINE_S = 240.0


def all_ranks(group: Group, method: str, *args):
    return group.submit(range(group.num_ranks), method, *args).result(DEADLINE_S)


def check(outcomes: list[Outcome]) -> list[Outcome]:
    assert [outcome.wrong for outcome in outcomes] == [0] * len(outcomes)
    assert [outcome.bytes_differ for outcome in outcomes] == [""] * len(outcomes)
    assert not any(outcome.transient_over for outcome in outcomes)
    return outcomes


def test_all_pairs_of_layouts_of_two(two: Group) -> None:
    for count, wrong in all_ranks(two, "all_pairs", Cluster(1, 2)):
        assert (count, wrong) == (5**2, [])


@pytest.mark.slow
def test_all_pairs_of_layouts_of_four(four: Group) -> None:
    """On one device, on pairs and on all four: equal, overlapping and disjoint meshes."""
    assert len(layouts_of(Cluster(1, 4))) == 4 + 2 * 3 + 6
    for count, wrong in all_ranks(four, "all_pairs", Cluster(1, 4)):
        assert (count, wrong) == (16**2, [])


@pytest.mark.slow
def test_all_pairs_of_two_nodes(four: Group) -> None:
    """Bytes enter a node once and are passed on inside: other messages, the same result."""
    for count, wrong in all_ranks(four, "all_pairs", Cluster(2, 2)):
        assert (count, wrong) == (16**2, [])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Layout.on(range(4), dp=2, tp=2), Layout.on(range(4), dp=4)),
        (Layout.on(range(4), dp=2, pp=2), Layout.on(range(4), tp=2, pp=2)),
        (Layout.on(range(2), dp=2), Layout.on((3, 2, 1), pp=3)),
    ],
    ids=str,
)
def test_optimizer_state_to_weights(four: Group, before: Layout, after: Layout, dtype: str) -> None:
    """To the training and the generation weights at once, rounded before they travel."""
    check(all_ranks(four, "masters_to_weights", before, after, dtype))


def test_optimizer_state_to_optimizer_state(four: Group) -> None:
    check(all_ranks(four, "masters_to_masters", Layout.on(range(4), dp=4), Layout.on(range(4), dp=2, tp=2)))


def test_keys_and_values(four: Group) -> None:
    """tp 2 to tp 4, where two ranks share each key-value head, and back to one rank."""
    shape = uniform(layers=3, heads=8, groups=2, key_dim=4, value_dim=3)
    one, pair, all_four = Layout.on((3,)), Layout.on((0, 1), tp=2), Layout.on(range(4), tp=4)
    for before, after in ((pair, all_four), (all_four, one), (pair, Layout.on((2, 3), pp=2))):
        check(all_ranks(four, "cache", shape, [5, 0, 9], before, after))


def test_moves_that_take_turns(two: Group, four: Group) -> None:
    assert all_ranks(two, "several_at_once") == [[0, 0, 0]] * 2
    assert all_ranks(four, "several_at_once") == [[0, 0, 0]] * 4


def test_steps_and_what_they_wait_for(two: Group) -> None:
    """One record per action of the row, in order; waits name the peer, the message and its bytes. The messages of the
    next rounds are on their way before the first is through, but not all of them."""
    for rank, (records, waits, posted) in enumerate(all_ranks(two, "actions")):
        assert [action for action, *_ in records] == [f"actor/{number}" for number in range(len(records))]
        received = [(peer, size) for _, kind, peer, size in records if kind == "RECV"]
        assert received
        assert all(peer == 1 - rank and size > 0 for peer, size in received)
        for peer, size in received:
            assert any(re.fullmatch(rf"rank {peer} \(actor: RECV \d+, {size} bytes\)", wait) for wait in waits)
        messages = sum(peer >= 0 for *_, peer, _ in records)
        assert posted[0] == 2 * AHEAD < messages == posted[-1]


def test_live_memory_sees_what_operators_allocate() -> None:
    known = torch.zeros(1000)
    with LiveMemory({"known": known}) as live:
        first = torch.empty(100)
        second = first.double()
        del first
        second[:10].add_(known[:10])
    assert live.peak_bytes == 100 * 4 + 100 * 8
