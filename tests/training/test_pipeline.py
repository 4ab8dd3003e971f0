"""The executor on real processes: any valid schedule gives the gradients of the whole, in the order of its row."""

from __future__ import annotations

import random

import pytest

from plait.errors import DataError
from plait.launch.interface import Group
from plait.models.team import Peers
from plait.policy.packing import MicroBatch
from plait.schedule.generators import gpipe, one_at_a_time, one_f_one_b, opposite
from plait.schedule.pipeline import Workload, fused_workload
from plait.schedule.schedule import Schedule, parse, with_transfers
from plait.schedule.validate import validate
from plait.training.pipeline import execute, forwards_only, workload_of

RAGGED = (7, 1, 4, 9, 2, 5)


def ragged(num_stages: int, count: int = len(RAGGED)) -> Workload:
    micros = [MicroBatch(((i,),), tokens) for i, tokens in enumerate(RAGGED[:count])]
    return workload_of("actor", 1, num_stages, micros)


def shuffled(workload: Workload, seed: int) -> Schedule:
    """A random valid schedule: any action whose turn it is, rank by rank."""
    draw = random.Random(seed)
    left = {action.id: action for action in workload.actions()}
    rows: list[list] = [[] for _ in range(workload.num_ranks)]
    done: set[str] = set()
    turn: dict[tuple, int] = {}
    while left:
        ready = [
            action
            for action in left.values()
            if set(action.waits) <= done
            and turn.get((action.kind, action.model, action.copy, action.stage), 0) == action.index
        ]
        action = draw.choice(ready)
        turn[action.kind, action.model, action.copy, action.stage] = action.index + 1
        done.add(action.id)
        rows[action.rank].append(left.pop(action.id))
    return Schedule(tuple(map(tuple, rows)), f"random {seed}")


def check(four: Group, schedule: Schedule, workload: Workload) -> None:
    validate(schedule, workload)
    explicit = with_transfers(schedule)
    answers = four.submit(range(4), "pipeline", schedule, RAGGED).result(60.0)
    for rank, row in enumerate(explicit.rows):
        done, off = answers[rank]
        assert done == [action.id for action in row]
        assert off <= 1e-12


@pytest.mark.parametrize("rule", [gpipe, one_f_one_b, one_at_a_time])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_one_model(four, rule, num_stages):
    workload = ragged(num_stages)
    check(four, rule(workload), workload)


@pytest.mark.parametrize("seed", range(12))
def test_any_valid_order(four, seed):
    workload = ragged(2 + seed % 3)
    check(four, shuffled(workload, seed), workload)


def test_explicit_transfers_and_text(four):
    workload = ragged(4)
    check(four, with_transfers(one_f_one_b(workload)), workload)
    check(four, parse(one_f_one_b(workload).to_text()), workload)


@pytest.mark.parametrize("seed", range(6))
def test_two_models_in_opposite_directions(four, seed):
    """Where one has half as many stages, as two copies side by side."""
    workload = fused_workload((4, 2 if seed % 2 else 4), (len(RAGGED),) * 2, (1.0, 1.0), models=("actor", "critic"))
    schedule = opposite(workload)[seed // 2] if seed < 4 else shuffled(workload, seed)
    check(four, schedule, workload)


def test_forwards_only_sends_on_without_end(four):
    """More micro-batches than are ever on their way at once."""
    tokens = [1 + i % 3 for i in range(40)]
    workload = workload_of("", 0, 4, [MicroBatch(((i,),), count) for i, count in enumerate(tokens)])
    schedule = forwards_only(workload)
    validate(schedule)
    answers = four.submit(range(4), "pipeline", schedule, tokens).result(60.0)
    assert [len(done) for done, _ in answers] == [len(row) for row in with_transfers(schedule).rows]


def test_what_is_no_pipeline_is_refused():
    peers = Peers((0, 1), 0, "pp")
    with pytest.raises(DataError, match="expected forwards and backwards"):
        execute(parse("rank 0: 0F0 0STEP\nrank 1: 1F0"), {}, peers, name="x")
    with pytest.raises(DataError, match="0F1 on rank 0 waits for 1F0, of which no message tells it"):
        execute(parse("rank 0: 0F0 0F1<1F0\nrank 1: 1F0 1F1"), {}, peers, name="x")
