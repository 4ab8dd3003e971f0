import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import DataError
from plait.planner.evaluate import score
from plait.schedule.action import Kind
from plait.schedule.generators import gpipe, one_at_a_time, one_f_one_b
from plait.schedule.schedule import Schedule, parse, with_transfers
from plait.schedule.validate import validate
from plait.simulator.static import simulate
from tests.schedule.workloads import workloads

TWO_STAGES = parse("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n")


def seconds(action):
    return 1.0 if action.kind is Kind.FORWARD else 2.0


def test_a_pipeline_by_hand():
    """F takes 1 s and B 2 s: rank 0 runs 0-1, 1-2, 4-6, 7-9; rank 1 runs 1-2, 2-4, 4-5, 5-7."""
    timeline = simulate(TWO_STAGES, seconds)
    at = {span.action: (span.start_s, span.end_s) for span in timeline.spans}
    assert at == {
        "0F0": (0, 1), "0F1": (1, 2), "0B0": (4, 6), "0B1": (7, 9),
        "1F0": (1, 2), "1B0": (2, 4), "1F1": (4, 5), "1B1": (5, 7),
    }  # fmt: skip
    assert timeline.makespan_s == 9


def test_latency_counts_between_ranks_only():
    timeline = simulate(TWO_STAGES, seconds, latency_s=lambda source, target: 0.5)
    at = {span.action: span.start_s for span in timeline.spans}
    assert at["1F0"] == 1.5
    assert at["1B0"] == 2.5
    assert at["0B0"] == 5.0


def test_sends_have_a_lane_of_their_own():
    """A send of 3 s does not hold up the next forward, but the next send."""
    schedule = with_transfers(TWO_STAGES, {"0F0": 64, "0F1": 64})
    timeline = simulate(schedule, lambda a: 3.0 if a.kind is Kind.SEND_FORWARD else seconds(a) if a.kind in "FB" else 0)
    at = {span.action: (span.start_s, span.end_s) for span in timeline.spans}
    assert at["0F1"] == (1, 2)
    assert at["0SEND_F0"] == (1, 4)
    assert at["0SEND_F1"] == (4, 7)
    assert at["1F0"][0] == 4
    assert {s.lane for s in timeline.spans} == {"compute", "send", "recv"}
    assert [s.bytes for s in timeline.spans if s.action == "0SEND_F0"] == [64]


def test_the_ledger_takes_at_the_start_and_gives_back_at_the_end():
    holds = {"0F0": 5.0, "0F1": 5.0, "0B0": -5.0, "0B1": -5.0}
    timeline = simulate(TWO_STAGES, seconds, holds=holds, caps=(10.0, 0.0))
    assert [(p.time_s, p.held) for p in timeline.memory] == [(0, 5), (1, 10), (6, 5), (9, 0)]
    with pytest.raises(DataError, match="0F1 on rank 0 makes it hold 10"):
        simulate(TWO_STAGES, seconds, holds=holds, caps=(9.0, 0.0))


def test_a_deadlock_is_explained():
    with pytest.raises(DataError, match=r"deadlock: 0B0 .* waits for 1B0"):
        simulate(parse("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1\n"), seconds)


@settings(deadline=None)
@given(workloads())
def test_the_simulator_agrees_with_the_search_about_time_and_memory(workload):
    for schedule in (gpipe(workload), one_f_one_b(workload), one_at_a_time(workload)):
        timeline = simulate(schedule, workload.duration_s(), holds=workload.holds())
        judged = score(workload, schedule)
        assert timeline.makespan_s == pytest.approx(judged.makespan)
        assert [timeline.peak_memory(v) for v in range(workload.num_ranks)] == pytest.approx(judged.peak_memory)


@settings(deadline=None)
@given(workloads(), st.randoms(use_true_random=False))
def test_a_makespan_is_at_least_critical_path_and_busiest_rank_and_grows_with_durations(workload, rng):
    """Monotone for a fixed schedule; list scheduling is not, and nothing here claims it."""
    schedule = one_f_one_b(workload)
    times = workload.duration_s()
    makespan = simulate(schedule, times).makespan_s
    chain = max(
        sum(p.forward_s[s][i] + p.backward_s[s][i] for s in range(p.num_stages))
        for p in workload.pipelines
        for i in range(p.num_microbatches)
    )
    assert makespan >= max(chain, *workload.work_s()) * (1 - 1e-12)
    longer = {action: took * (1 + rng.random() * rng.randrange(2)) for action, took in times.items()}
    assert simulate(schedule, longer).makespan_s >= makespan * (1 - 1e-12)


@settings(deadline=None)
@given(workloads(), st.randoms(use_true_random=False))
def test_an_acyclic_schedule_never_deadlocks_with_eager_receives(workload, rng):
    """Any order that some clock could have produced runs to its end, transfers and all."""
    ready = {action.id: action for action in workload.actions()}
    done: list = []
    rows: list[list] = [[] for _ in range(workload.num_ranks)]
    ids: set[str] = set()
    while ready:
        open_ids = [name for name, action in ready.items() if set(action.waits) <= ids and in_order(action, ids)]
        action = ready.pop(rng.choice(open_ids))
        ids.add(action.id)
        rows[action.rank].append(action)
        done.append(action)
    schedule = Schedule(tuple(map(tuple, rows)))
    validate(schedule, fused_caps_off(workload))
    moved = with_transfers(schedule)
    validate(moved)
    assert len(simulate(moved, lambda action: 1.0).spans) == len(moved)


def in_order(action, ids):
    if not action.index:
        return True
    return any(name.endswith(f"{action.kind.value}{action.index - 1}") and name[: -len(str(action.index - 1))]
               == action.id[: -len(str(action.index))] for name in ids)  # fmt: skip


def fused_caps_off(workload):
    return type(workload)(workload.pipelines, workload.num_ranks)
