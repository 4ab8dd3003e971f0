import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import DataError
from plait.planner.search import search
from plait.schedule.action import Action, Kind
from plait.schedule.generators import gpipe, in_flight, one_at_a_time, one_f_one_b, opposite
from plait.schedule.pipeline import Workload, fused_workload
from plait.schedule.schedule import Schedule, parse, with_transfers
from plait.schedule.validate import validate
from tests.cases import examples
from tests.schedule.workloads import workloads

quick = settings(deadline=None, max_examples=40)


@quick
@given(workloads())
def test_text_and_file_read_back(workload):
    for schedule in (one_f_one_b(workload), with_transfers(gpipe(workload), {"a:0F0": 512})):
        assert parse(schedule.to_text(), schedule.name) == schedule
        assert Schedule.from_json(schedule.to_json()) == schedule


def test_the_text_of_a_pipeline_is_short():
    workload = fused_workload((2,), (2,), (1,), models=("",))
    assert one_f_one_b(workload).to_text() == "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n"


def test_waits_that_are_not_the_pipelines_own_are_written():
    text = "rank 0: 0F0 0B0<0F0\nrank 1: 1F0< 1B0 1STEP<1B0&0B0\n"
    schedule = parse(text)
    assert schedule.rows[1][0].waits == ()
    assert schedule.rows[1][2].waits == ("1B0", "0B0")
    assert schedule.to_text() == text


def test_1f1b_by_hand():
    """Three stages, four micro-batches: stage 0 warms up with three forwards, the last with one."""
    schedule = one_f_one_b(fused_workload((3,), (4,), (1,), models=("",)))
    assert schedule.ids() == (
        ("0F0", "0F1", "0F2", "0B0", "0F3", "0B1", "0B2", "0B3"),
        ("1F0", "1F1", "1B0", "1F2", "1B1", "1F3", "1B2", "1B3"),
        ("2F0", "2B0", "2F1", "2B1", "2F2", "2B2", "2F3", "2B3"),
    )
    assert [most[""] for most in in_flight(schedule)] == [3, 2, 1]


@settings(deadline=None, max_examples=examples(6, 40))
@given(workloads())
def test_every_schedule_produced_is_valid(workload):
    bare = Workload(workload.pipelines, workload.num_ranks)
    for schedule in (gpipe(bare), one_f_one_b(bare), *opposite(bare)):
        validate(schedule, bare)
    validate(one_at_a_time(workload), workload)
    for model in workload.models():
        validate(one_f_one_b(workload.only(model)), workload.only(model))
    found = search(workload, 60.0, max_moves=20_000)
    validate(found.schedule, workload)
    assert found.score.makespan >= found.lower_bound * (1 - 1e-9)


@quick
@given(workloads(), st.randoms(use_true_random=False))
def test_a_corrupted_schedule_is_rejected_with_the_action_named(workload, rng):
    schedule = one_f_one_b(Workload(workload.pipelines, workload.num_ranks))
    rows = [list(row) for row in schedule.rows]
    rank = rng.randrange(len(rows))
    spot = rng.randrange(len(rows[rank]))
    victim = rows[rank][spot]
    match rng.choice(["drop", "twice", "move", "stranger", "order"]):
        case "drop":
            del rows[rank][spot]
            wanted = victim.id
        case "twice":
            rows[rank].insert(rng.randrange(len(rows[rank])), victim)
            wanted = victim.id
        case "move" if len(rows) > 1:
            rows[(rank + 1) % len(rows)].append(rows[rank].pop(spot))
            wanted = victim.id
        case "order":
            backward = next(k for k, a in enumerate(rows[rank]) if a.kind is Kind.BACKWARD)
            victim = rows[rank].pop(backward)
            rows[rank].insert(0, victim)
            wanted = victim.id
        case _:
            stranger = Action(Kind.FORWARD, "a", 0, 0, 99, rank=rank)
            rows[rank].append(stranger)
            wanted = stranger.id
    with pytest.raises(DataError) as error:
        validate(Schedule(tuple(map(tuple, rows))), workload)
    assert wanted in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0: 0F0 0F1 0B0 0B1 0F2\nrank 1: 1F0 1B0 1F1 1B1", "0F2 on rank 0 is no action of the workload"),
        ("rank 0: 0F1 0F0 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1", "0F0 on rank 0 comes after 0F1"),
        ("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1", "deadlock: 0B0 on rank 0 waits for 1B0, .*behind 1F1"),
        ("rank 0: 0F0 0F1 0B0 0B1<0F0\nrank 1: 1F0 1B0 1F1 1B1", "0B1 should wait for 1B1"),
        ("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0<7F0 1B0 1F1 1B1", "1F0 on rank 1 waits for 7F0, which no rank runs"),
        ("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1", "1B1 is missing; rank 1 should run it"),
        ("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\nrank 2:", "rows for 2 ranks, found 3"),
    ],
)
def test_what_is_wrong_is_said(text, message):
    with pytest.raises(DataError, match=message):
        validate(parse(text), fused_workload((2,), (2,), (1,), models=("",)))


def test_memory_over_the_cap_names_the_action():
    workload = fused_workload((2,), (3,), (1,), activation=(2.0,), cap=(5.0, 9.0), models=("",))
    with pytest.raises(DataError, match="0F2 on rank 0 makes it hold 6, over its cap of 5"):
        validate(gpipe(workload), workload)
    capped = fused_workload((2,), (3,), (1,), activation=(2.0,), cap=4.0, models=("",))
    validate(one_f_one_b(capped), capped)


def test_a_row_of_another_rank_is_refused():
    rows = parse("rank 0: 0F0\nrank 1: 1F0\n").rows
    with pytest.raises(DataError, match="1F0 is for rank 1"):
        validate(Schedule((rows[0] + rows[1], ())))
    with pytest.raises(DataError, match="0F0 is on rank 0 and again on rank 1"):
        validate(parse("rank 0: 0F0\nrank 1: 0F0\n"))


def test_transfers_of_two_stages_by_hand():
    schedule = with_transfers(parse("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n"), {"0F0": 8, "1B1": 4})
    assert schedule.ids() == (
        ("0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"),
        ("1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"),
    )
    sizes = {action.id: action.bytes for action in schedule if action.bytes}
    assert sizes == {"0SEND_F0": 8, "1RECV_F0": 8, "1SEND_B1": 4, "0RECV_B1": 4}
    validate(schedule)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "does not parse"),
        ("{}", "expected a schedule file"),
        ('{"format": "plait-schedule", "version": 7}', "version 1, found 7"),
        ('{"format": "plait-schedule", "version": 1, "rows": 3}', "expected `rows`"),
        ('{"format": "plait-schedule", "version": 1, "rows": [["0Q0"]]}', "s.json: expected an action .*'0Q0'"),
        ('{"format": "plait-schedule", "version": 1, "rows": [[5]]}', "s.json"),
    ],
)
def test_other_files_are_refused(text, message):
    with pytest.raises(DataError, match=message):
        Schedule.from_json(text, "s.json")


def test_files_and_lines_are_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.json"):
        Schedule.load(tmp_path / "none.json")
    with pytest.raises(DataError, match="line 2 of the schedule: expected 'rank 1"):
        parse("rank 0: 0F0\nrank 7: 1F0\n")
    schedule = parse("rank 0: 0F0\n", "mine")
    schedule.save(tmp_path / "s.json")
    assert Schedule.load(tmp_path / "s.json") == schedule


def test_random_orders_of_random_rows_never_pass_unless_they_run():
    """A shuffled row is either refused or really runs: validation agrees with the search's evaluation."""
    import numpy as np

    from plait.planner.kernels import evaluate
    from plait.planner.tables import order_of, tables_of

    workload = fused_workload((3, 3), (2, 2), (1, 2))
    t, rng, runs = tables_of(workload), random.Random(0), 0
    base = one_f_one_b(workload)
    for _ in range(300):
        rows = []
        for row in base.rows:
            row = list(row)
            for _ in range(rng.randrange(3)):
                k = rng.randrange(len(row) - 1)
                row[k], row[k + 1] = row[k + 1], row[k]
            rows.append(tuple(row))
        schedule = Schedule(tuple(rows))
        order = order_of(workload, schedule)
        runs_through = evaluate(t, order, np.inf, np.zeros(len(order)), np.zeros(9, np.int64)) < np.inf
        problem = fault(schedule, workload)
        if problem is None:
            assert runs_through
            runs += 1
        else:
            assert not runs_through or "keep order" in problem or "before its forward" in problem
    assert runs > 20


def fault(schedule, workload):
    """What `validate` says, None if nothing."""
    try:
        validate(schedule, workload)
    except DataError as error:
        return str(error)
    return None
