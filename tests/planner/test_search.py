"""The published table, closed forms, brute force, twins. Slow proofs are marked; a quick part of each is not."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings

from plait.errors import ConfigError
from plait.planner import annealing, kernels
from plait.planner.bounds import data_parallel_ideal, lower_bound, memory_bound
from plait.planner.evaluate import score, score_order, serial_makespan
from plait.planner.exact import available, minimise_makespan, minimise_memory, search_exact
from plait.planner.greedy import greedy
from plait.planner.search import search
from plait.planner.tables import order_of, tables_of
from plait.schedule.generators import one_f_one_b, opposite
from plait.schedule.pipeline import Pipeline, Workload, fused_workload
from plait.schedule.schedule import Schedule
from plait.schedule.validate import validate
from plait.simulator.static import simulate
from tests.cases import slow_but
from tests.schedule.workloads import PROBLEMS, random_workload, workloads

needs_solver = pytest.mark.skipif(not available(), reason="OR-Tools is not installed")
rows = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"row{problem.number}")


def greedy_score(workload):
    t = tables_of(workload)
    return score_order(workload, t, greedy(workload, t))


def simple_bound(workload: Workload) -> float:
    """The bound that RLHFuse prints as the theoretical best: critical path of one model, or average work."""
    alone = []
    for pipeline in workload.pipelines:
        forward_s, backward_s = pipeline.forward_s, pipeline.backward_s
        for stage in range(pipeline.num_stages):
            ramp = sum(row[0] for row in forward_s[:stage]) + sum(row[-1] for row in backward_s[:stage])
            alone.append(sum(forward_s[stage]) + sum(backward_s[stage]) + ramp)
    return max([data_parallel_ideal(workload), *alone])


@rows
def test_published_table_greedy_bounds_and_baselines(problem):
    workload = problem.workload
    result = greedy_score(workload)
    assert (result.makespan, round(result.worst_peak, 6)) == (problem.greedy, problem.greedy_memory)
    assert lower_bound(workload) == problem.lower_bound
    assert simple_bound(workload) == problem.simple_bound
    assert memory_bound(workload) == pytest.approx(problem.stages[0] * problem.memory[0])
    alone = {model: one_f_one_b(workload.only(model)) for model in workload.models()}
    assert serial_makespan(workload, alone) == problem.serial
    assert min(score(workload, s).makespan for s in opposite(workload)) == problem.opposite


@pytest.mark.parametrize("number", slow_but([2], [0, 2, 5, 9, 11]))
def test_published_table_search_at_the_bound(number):
    """By moves, not by time; the benchmark and the slow test take all rows and the memory too."""
    problem = PROBLEMS[number]
    found = search(problem.workload, 300.0, max_moves=400_000, memory=False)
    validate(found.schedule, problem.workload)
    assert found.proven
    assert found.score.makespan == problem.lower_bound


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_published_table_search_all_rows_within_a_minute_each():
    """CPU seconds of one core, so that the machine's other work does not count."""
    lean = 0
    for problem in PROBLEMS:
        found = search(problem.workload, 60.0, clock=time.process_time)
        validate(found.schedule, problem.workload)
        assert found.score.makespan == problem.lower_bound, f"row {problem.number}"
        lean += found.score.worst_peak <= problem.peak_memory + 1e-9
    assert lean >= 8


@pytest.mark.slow
@needs_solver
def test_published_table_with_or_tools_in_ten_seconds_each():
    at_bound = sum(search_exact(p.workload, 10.0).score.makespan == p.lower_bound for p in PROBLEMS)
    assert at_bound >= 11


@pytest.mark.parametrize(
    ("num_ranks", "microbatches", "forward", "serial", "crossed", "by_greed", "fused", "ideal"),
    [
        (2, 1, (2, 2), 24, 22, 12, 12, 12),
        (2, 2, (2, 2), 36, 34, 32, 24, 24),
        (2, 4, (2, 2), 60, 58, 56, 48, 48),
        (2, 8, (2, 2), 108, 106, 104, 96, 96),
        (2, 4, (4, 2), 90, 86, 78, 72, 72),
        (4, 4, (2, 2), 84, 78, 68, 54, 48),
        (4, 8, (2, 2), 132, 126, 120, 102, 96),
        (4, 8, (4, 2), 198, 186, 174, 156, 144),
    ],
)
def test_closed_forms_of_small_pipelines(num_ranks, microbatches, forward, serial, crossed, by_greed, fused, ideal):
    workload = fused_workload((num_ranks,) * 2, (microbatches,) * 2, forward)
    alone = {model: one_f_one_b(workload.only(model)) for model in workload.models()}
    assert serial_makespan(workload, alone) == serial
    assert serial == sum(3 * (microbatches + num_ranks - 1) * f for f in forward)
    assert min(score(workload, s).makespan for s in opposite(workload)) == crossed
    assert greedy_score(workload).makespan == by_greed
    assert search(workload, 300.0, max_moves=2_000_000, memory=False).score.makespan == fused == lower_bound(workload)
    assert data_parallel_ideal(workload) == ideal
    if num_ranks == 2:
        m1, m2 = microbatches, microbatches
        f1, f2 = forward
        assert fused == max(3 * (m1 + 1) * f1, 3 * (m2 + 1) * f2, 3 * (m1 * f1 + m2 * f2))


def brute_force(workload):
    """The least makespan over all orders of every rank that keep the order of chains."""
    by_rank = []
    for rank in range(workload.num_ranks):
        chains: dict[tuple, list] = {}
        for action in workload.actions():
            if action.rank == rank:
                chains.setdefault((action.model, action.copy, action.kind), []).append(action)
        for chain in chains.values():
            chain.sort(key=lambda action: action.index)
        by_rank.append(list(interleavings(list(chains.values()))))
    t, best = tables_of(workload), np.inf
    scratch = np.zeros(3 * workload.num_ranks, np.int64)
    for rows in itertools.product(*by_rank):
        order = order_of(workload, Schedule(tuple(map(tuple, rows))))
        best = min(best, kernels.evaluate(t, order, np.inf, np.zeros(len(order)), scratch))
    return best


def interleavings(chains):
    """All merges of the chains in which every backward follows its forward."""
    if not any(chains):
        yield []
        return
    for k, chain in enumerate(chains):
        if chain:
            head = chain[0]
            ahead = [a for other in chains for a in other if a.index == head.index and a.id != head.id]
            if head.kind.value == "B" and any(
                (a.model, a.copy, a.kind.value) == (head.model, head.copy, "F") for a in ahead
            ):
                continue
            for rest in interleavings([c[1:] if j == k else c for j, c in enumerate(chains)]):
                yield [head, *rest]


@pytest.mark.parametrize(
    ("microbatches", "forward", "expected"), [((1, 1), (2, 2), 12), ((2, 1), (2, 2), 18), ((2, 1), (4, 1), 36)]
)
def test_brute_force_of_two_ranks(microbatches, forward, expected):
    workload = fused_workload((2, 2), microbatches, forward)
    assert brute_force(workload) == expected
    assert search(workload, 300.0, max_moves=300_000, memory=False).score.makespan == expected


def test_brute_force_of_two_ranks_with_unequal_stages_and_micro_batches():
    table = lambda *stages: tuple(tuple(map(float, stage)) for stage in stages)
    a = Pipeline("a", 0, (0, 1), table((3, 1), (2, 5)), table((4, 2), (1, 6)), table((1, 1), (1, 1)))
    b = Pipeline("b", 0, (1, 0), table((2,), (7,)), table((3,), (5,)), table((1,), (1,)))
    workload = Workload((a, b), 2)
    assert search(workload, 300.0, max_moves=300_000, memory=False).score.makespan == brute_force(workload)


def test_ten_thousand_swaps_on_critical_arcs_never_deadlock():
    t = tables_of(PROBLEMS[5].workload)
    order = order_of(PROBLEMS[5].workload, one_f_one_b(PROBLEMS[5].workload))
    n, state = len(order), np.asarray([11, 13])
    end, scratch, slot_of = np.zeros(n), np.zeros(3 * 8, np.int64), np.argsort(order)
    swapped = 0
    for _ in range(10_000):
        makespan = kernels.evaluate(t, order, np.inf, end, scratch)
        assert makespan < np.inf
        slot = annealing._critical_slot(t, order, slot_of, end, makespan, state)
        if slot >= 0 and annealing._reach(t, order, t.cap, slot, slot - 1) == slot - 1:
            annealing._shift(order, slot_of, slot, slot - 1)
            swapped += 1
    assert swapped > 9_000


@settings(deadline=None, max_examples=60)
@given(workloads())
def test_every_start_order_and_every_decode_fits_the_caps(workload):
    """No keys, however wild, make the decode exceed a cap or run into a deadlock."""
    t = tables_of(workload)
    n = len(t.rank)
    order, end = np.zeros(n, np.int64), np.zeros(n)
    rng = np.random.default_rng(0)
    for _ in range(5):
        makespan = kernels.decode(t, rng.random(n) * 100, t.cap, np.inf, order, end)
        assert makespan < np.inf
        result = score_order(workload, t, order)
        assert result.makespan == pytest.approx(makespan)
        assert all(peak <= cap + 1e-9 for peak, cap in zip(result.peak_memory, workload.caps, strict=True))
        again = kernels.decode(t, end - t.seconds, t.cap, np.inf, order.copy(), end)
        assert again == pytest.approx(makespan), "start times as keys give the same schedule"


@settings(deadline=None, max_examples=60)
@given(workloads())
def test_the_bound_is_at_least_the_published_one_and_at_most_any_schedule(workload):
    """max_v [min head + work(v) + min tail], with heads and tails of whole micro-batches."""
    t = tables_of(workload)
    heads = {}
    for p in workload.pipelines:
        for stage, rank in enumerate(p.ranks):
            before = sum(min(row) for row in p.forward_s[:stage])
            after = sum(min(row) for row in p.backward_s[:stage])
            heads.setdefault(rank, []).append((before, after))
    published = max(
        min(h for h, _ in heads[rank]) + workload.work_s()[rank] + min(b for _, b in heads[rank]) for rank in heads
    )
    bound = lower_bound(workload)
    assert bound >= published * (1 - 1e-9)
    order = greedy(Workload(workload.pipelines, workload.num_ranks), t)
    assert bound <= score_order(workload, t, order).makespan * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("activation", [(0, 0), (0, 1), ((0, 0, 0, 1), 0)])
def test_first_stages_may_hold_nothing(activation):
    """What greed makes takes 23, and no schedule less than 21, whatever it holds."""
    workload = fused_workload((4, 2), (4, 2), (1, 1), activation=activation)
    found = search(workload, 60.0, max_moves=100_000)
    validate(found.schedule, workload)
    assert found.score.makespan == 21


def test_a_seed_and_a_number_of_moves_give_one_schedule():
    workload = random_workload(10)
    one, other = (search(workload, 300.0, seed=4, max_moves=20_000).schedule for _ in range(2))
    assert one == other


@pytest.mark.slow
def test_the_twins_in_plain_python_search_alike():
    """The whole search, interpreted, in a process of its own: the same schedule to the last action."""
    code = (
        "from plait.schedule.pipeline import fused_workload\n"
        "from plait.planner.search import search\n"
        "w = fused_workload((2, 2), (3, 3), [[3, 4], [2, 5]], [[5, 3], [4, 4]], (2, 3), 7)\n"
        "from plait.planner.portfolio import Portfolio\n"
        "p = Portfolio(w, 3)\n"
        "import numpy as np\n"
        "from plait.planner import annealing as e, evolution, kernels as k\n"
        "t, s = p.t, np.asarray([5, 7])\n"
        "best = p.best.copy()\n"
        "out = [e.anneal(t, p.best.copy(), t.cap, 0.0, 60, 3.0, 0.1, s, best), best.tolist()]\n"
        "out += [e.squeeze(t, p.best.copy(), 2.0, 1e9, 60, 3.0, 0.1, s, best), best.tolist()]\n"
        "end = np.zeros(p.n)\n"
        "k.evaluate(t, p.best, np.inf, end, np.zeros(6, np.int64))\n"
        "out += [e.wander(t, end - t.seconds, t.cap, 0.0, 60, 3.0, 0.1, s, best), best.tolist()]\n"
        "found = np.asarray([p.makespan, p.peak])\n"
        "out += [evolution.evolve(t, t.cap, p.bound, p.lean, 60, s, p.pool, p.pool_score, found, best)]\n"
        "out += [best.tolist(), found.tolist(), p.pool.sum().item(), s.tolist()]\n"
        "from plait.planner.sweep import Sweep\n"
        "sweep = Sweep(t, 1e9, 20, 2.0, s)\n"
        "out += [sweep.leg(10**6), sweep.cut, sweep.order().tolist(), s.tolist()]\n"
        "print([tuple(map(float, o)) if isinstance(o, tuple) else o for o in out])\n"
    )
    outputs = []
    for disabled in ("0", "1"):
        env = {**os.environ, "NUMBA_DISABLE_JIT": disabled}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 200


@pytest.mark.parametrize("number", slow_but([signal.SIGHUP], [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
def test_ctrl_c_returns_the_best_so_far(number):
    calls = []

    def interrupt(progress):
        calls.append(progress)
        if len(calls) == 3:
            signal.raise_signal(number)

    problem = PROBLEMS[1]
    before = signal.getsignal(number)
    found = search(problem.workload, 300.0, on_progress=interrupt)
    assert found.stopped_by == "interrupted"
    assert len(calls) == 3
    validate(found.schedule, problem.workload)
    assert found.score.makespan <= problem.greedy
    assert signal.getsignal(number) is before, "the handler is given back"
    assert search(problem.workload, 0.0).stopped_by == "time"


def test_one_model_alone_is_at_least_as_short_as_1f1b():
    workload = fused_workload((4,), (8,), (2,))
    found = search(workload, 300.0, max_moves=100_000)
    assert found.score.makespan == score(workload, one_f_one_b(workload)).makespan == 3 * (8 + 4 - 1) * 2
    assert found.score.worst_peak == 4


@pytest.mark.parametrize("caps", slow_but([[2.0, 8.0]], [[2.0, 8.0], [2.0, 3.0, 4.0, 8.0]]), ids=str)
def test_a_lower_cap_never_gives_a_shorter_optimum_and_is_kept(caps):
    makespans = []
    for cap in caps:
        workload = fused_workload((2, 2), (4, 4), (2, 1), activation=(2, 1), cap=cap)
        found = search(workload, 300.0, max_moves=100_000)
        assert found.score.worst_peak <= cap
        makespans.append(found.score.makespan)
    assert makespans == sorted(makespans, reverse=True)
    assert makespans[0] > makespans[-1]


@needs_solver
@pytest.mark.parametrize("seed", slow_but([1, 7, 34], [1, 7, 25, 34]))
def test_the_search_finds_the_proven_optimum(seed):
    """A few of the random problems, capped ones among them, by moves; the slow test takes 200."""
    workload = random_workload(seed)
    found = search(workload, 300.0, seed=seed, max_moves=1_500_000, memory=False)
    solved = minimise_makespan(workload, 120.0, order_of(workload, found.schedule))
    assert solved.proven
    assert found.score.makespan == pytest.approx(solved.bound)


@pytest.mark.slow
@needs_solver
def test_the_search_finds_the_proven_optimum_of_random_problems_in_five_seconds():
    equal = proven = 0
    for seed in range(200):
        workload = random_workload(seed)
        found = search(workload, 5.0, seed=seed, memory=False, clock=time.process_time)
        optimum = found.score.makespan
        if not found.proven:
            solved = minimise_makespan(workload, 300.0, order_of(workload, found.schedule))
            if not solved.proven:
                continue
            optimum = solved.bound
        proven += 1
        equal += found.score.makespan <= optimum + 1e-6
    assert proven >= 190
    assert equal >= 0.95 * proven


@needs_solver
def test_cp_sat_judges_without_a_start_and_with_fractions():
    workload = fused_workload((2, 2), (2, 2), (0.5, 0.25), activation=(1.95, 1), cap=4.9)
    solved = minimise_makespan(workload, 30.0)
    assert solved.proven
    result = score_order(workload, tables_of(workload), solved.order)
    assert result.makespan == pytest.approx(solved.bound)
    assert result.worst_peak <= 4.9
    lean = minimise_memory(workload, result.makespan, 30.0, solved.order)
    assert score_order(workload, tables_of(workload), lean).worst_peak <= result.worst_peak
    found = search_exact(workload, 5.0)
    assert found.proven
    assert found.score.makespan == pytest.approx(solved.bound)
    validate(found.schedule, workload)


def test_the_simulated_fused_schedule_is_what_the_search_promised():
    problem = PROBLEMS[2]
    found = search(problem.workload, 300.0, max_moves=200_000)
    timeline = simulate(found.schedule, problem.workload.duration_s(), holds=problem.workload.holds())
    assert timeline.makespan_s == found.score.makespan
    peaks = [timeline.peak_memory(rank) for rank in range(problem.workload.num_ranks)]
    assert peaks == pytest.approx(found.score.peak_memory)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": (8, 3), "microbatches": (2, 2), "forward_s": (1, 1)}, "stages: expected 8/3 to be a whole number"),
        ({"stages": (2, 2, 2), "microbatches": (2,), "forward_s": (1,)}, "stages: expected one or two models, found 3"),
        ({"stages": (2, 2), "microbatches": (2,), "forward_s": (1, 1)}, "microbatches: expected 2 values"),
        (
            {"stages": (2, 2), "microbatches": (2, 0), "forward_s": (1, 1)},
            "microbatches: expected whole numbers",
        ),
        ({"stages": (2, 2), "microbatches": (2, 2), "forward_s": (1, [1, 2, 3])}, "forward: expected one value or 2"),
        ({"stages": (2, 2), "microbatches": (2, 2), "forward_s": (1, 0)}, "expected forward_s above zero"),
        (
            {"stages": (2, 2), "microbatches": (2, 2), "forward_s": (1, 1), "cap": (3,) * 3},
            "cap: expected one value or 2",
        ),
        ({"stages": (2, 2), "microbatches": (2, 2), "forward_s": (1, 1), "cap": 0.5}, "cap: rank 0 may hold 0.5"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        fused_workload(**arguments)
