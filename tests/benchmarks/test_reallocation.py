"""The benchmark of reallocation: what it says of the other systems is what their papers say."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from types import ModuleType

import pytest

from plait.layout.holdings import weights
from plait.layout.mesh import Cluster, Layout
from plait.layout.move import plan_move
from plait.layout.regroup import regrouped
from tests.benchmarks.scripts import output_of
from tests.layout.test_golden import SMALL

WHOLE = SMALL.num_elements * 2


@pytest.fixture
def strategies(imported: Callable[[str], ModuleType]) -> ModuleType:
    return imported("reallocation.strategies")


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        (Layout.on(range(8), tp=8), Layout.on(range(8), dp=4, tp=2), Fraction(7, 8)),
        (Layout.on(range(4), tp=4), Layout.on(range(4), dp=2, tp=2), Fraction(3, 4)),
        (Layout.on(range(32), tp=8, pp=4), Layout.on(range(32), dp=4, tp=8), Fraction(31, 32)),
        (Layout.on(range(64), tp=8, pp=8), Layout.on(range(64), dp=8, tp=8), Fraction(63, 64)),
    ],
    ids=str,
)
def test_gathering_everything(strategies: ModuleType, before: Layout, after: Layout, share: Fraction) -> None:
    """HybridFlow's table 2: (tp - 1) / (tp) of the model on each device, tp the devices of a training replica."""
    cluster = Cluster(max(1, len(before.mesh) // 8), min(8, len(before.mesh)))
    found = strategies.gather_all(weights(SMALL, before, "bfloat16"), weights(SMALL, after, "bfloat16"), cluster)
    assert {Fraction(size, WHOLE) for size in found.received.values()} == {share}


@pytest.mark.parametrize(("tp", "pp", "generate_tp"), [(8, 1, 2), (4, 1, 2), (8, 4, 8), (8, 8, 8)])
def test_micro_dp_groups_are_least_where_they_apply(strategies: ModuleType, tp: int, pp: int, generate_tp: int) -> None:
    size = tp * pp
    cluster = Cluster(max(1, size // 8), min(8, size))
    before = Layout.on(range(size), tp=tp, pp=pp)
    source = weights(SMALL, before, "bfloat16", "before")
    after = regrouped(Layout.on(range(size), dp=size // generate_tp, tp=generate_tp), SMALL, source, cluster)
    found = strategies.micro_dp(SMALL, before, after, 2)
    share = Fraction(size - generate_tp, generate_tp * size)
    assert {Fraction(received, WHOLE) for received in found.received.values()} == {share}
    assert found.total == plan_move(source, weights(SMALL, after, "bfloat16"), cluster).traffic.total_bytes
    other = Layout.on(range(size), pp=size)
    assert strategies.micro_dp(SMALL, before, other, 2) is None


def test_one_node_sends_all_broadcasts(strategies: ModuleType) -> None:
    """ReaL from two nodes of training to four others: one sends 4 M where two could send 2 M each."""
    before, after = Layout.on(range(16), dp=2, tp=8), Layout.on(range(16, 48), dp=4, tp=8)
    found = strategies.broadcasts(SMALL, before, after, Cluster(6, 8), 2)
    assert found.leaving == {0: 4 * WHOLE}
    assert found.total == 4 * WHOLE


def test_broadcasts_reach_those_who_have_it(strategies: ModuleType) -> None:
    """Two replicas of tp 2 become one of tp 1 on each rank: every rank but a sender receives each half, held or not."""
    before, after = Layout.on(range(4), dp=2, tp=2), Layout.on(range(4), dp=4)
    found = strategies.broadcasts(SMALL, before, after, Cluster(1, 4), 2)
    assert found.total == 2 * 3 * WHOLE // 2
    least = plan_move(weights(SMALL, before, "bfloat16", "a"), weights(SMALL, after, "bfloat16", "b"), Cluster(1, 4))
    assert least.traffic.total_bytes == 2 * WHOLE
    assert strategies.broadcasts(SMALL, Layout.on(range(3), tp=3), Layout.on(range(2), tp=2), Cluster(1, 4), 2) is None


@pytest.mark.slow
def test_it_runs() -> None:
    rows = output_of("reallocation.py", "--models", "135M tied", "--repeats", "1").splitlines()
    assert "135M tied: 0.13 G parameters, 272 tensors" in rows
    assert len([row for row in rows if "(" in row]) == 9


def test_real_moves_run() -> None:
    """Every way checks what it moved, element by element."""
    rows = output_of("reallocation.py", "--processes", "2", "--models", "tiny", "--repeats", "1").splitlines()
    assert len([row for row in rows if row.count("|") == 3]) == 4
