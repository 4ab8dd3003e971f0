"""What holds of every cost: a faster machine is never slower, more work never takes less, terms sum, moves cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cost.cluster import ClusterSpec
from plait.cost.cluster_file import read_cluster
from plait.cost.costs import CallCost
from plait.cost.decoding import dealt, profile
from plait.cost.hardware import Link, Software
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.model_costs import ModelCosts
from plait.cost.workload import Workload
from plait.layout.mesh import Layout
from plait.schedule.plan import Mode
from tests.cost.test_model_costs import SHAPE, a_flow

FLOW = a_flow()
CALLS: tuple[tuple[str, Mode], ...] = (
    ("actor.generate", "decode"),
    ("ref.logprobs", "score"),
    ("actor.train", "train"),
)
SIZES = st.sampled_from(
    [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2), (4, 2, 2)]
)
LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=8).map(Lengths.recorded)
SOFTWARE = st.builds(
    Software,
    products=st.floats(0.1, 1.0),
    memory=st.floats(0.1, 1.0),
    links=st.floats(0.1, 1.0),
    layer_s=st.floats(0.0, 1e-3),
    hop_s=st.floats(0.0, 1e-3),
    decode_groups_per_stage=st.integers(0, 2),
)


def a_workload(prompts: int, samples: int, asked: Lengths, said: Lengths) -> Workload:
    return Workload(prompts, samples, SampleLengths(asked, said), max_running=8)


def all_calls(workload: Workload, cluster: ClusterSpec, layout: Layout) -> list[CallCost]:
    costs = ModelCosts(workload, dict.fromkeys(FLOW.roles, SHAPE), FLOW, cluster)
    return [costs.call(call, mode, layout) for call, mode in CALLS]


@given(SIZES, SOFTWARE, st.integers(1, 9), st.integers(1, 4), LENGTHS, LENGTHS)
@settings(max_examples=25, deadline=None)
def test_terms_sum_and_nothing_is_negative(
    sizes: tuple[int, int, int], software: Software, prompts: int, samples: int, asked: Lengths, said: Lengths
) -> None:
    dp, tp, pp = sizes
    cluster = replace(read_cluster("16xA100-80G"), software=software)
    for found in all_calls(
        a_workload(prompts, samples, asked, said), cluster, Layout.on(range(dp * tp * pp), dp, tp, pp)
    ):
        assert found.seconds == pytest.approx(sum(found.terms.values()))
        assert all(seconds >= 0 for seconds in found.terms.values())
        assert len(found.working_bytes) == pp
        assert found.seconds > 0


@given(SIZES, SOFTWARE, st.integers(1, 9), LENGTHS, LENGTHS, st.sampled_from(["flops", "memory_bandwidth", "links"]))
@settings(max_examples=25, deadline=None)
def test_a_faster_machine_is_never_slower(
    sizes: tuple[int, int, int], software: Software, prompts: int, asked: Lengths, said: Lengths, what: str
) -> None:
    dp, tp, pp = sizes
    slow = replace(read_cluster("16xA100-80G"), software=software)
    if what == "links":
        double = lambda link: Link(2 * link.bandwidth, link.latency_s)
        fast = replace(slow, intra=double(slow.intra), inter=double(slow.inter))
    else:
        fast = replace(slow, device=replace(slow.device, **{what: 2 * getattr(slow.device, what)}))
    workload, layout = a_workload(prompts, 2, asked, said), Layout.on(range(dp * tp * pp), dp, tp, pp)
    for one, other in zip(all_calls(workload, slow, layout), all_calls(workload, fast, layout), strict=True):
        assert other.seconds <= one.seconds * (1 + 1e-9)


@given(SIZES, SOFTWARE, st.integers(1, 9), st.integers(1, 100), st.integers(1, 100), st.integers(1, 50))
@settings(max_examples=25, deadline=None)
def test_longer_responses_never_take_less(
    sizes: tuple[int, int, int], software: Software, prompts: int, asked: int, said: int, more: int
) -> None:
    dp, tp, pp = sizes
    cluster = replace(read_cluster("16xA100-80G"), software=software)
    layout = Layout.on(range(dp * tp * pp), dp, tp, pp)
    short, long = (
        all_calls(a_workload(prompts, 2, Lengths.fixed(asked), Lengths.fixed(tokens)), cluster, layout)
        for tokens in (said, said + more)
    )
    for one, other in zip(short, long, strict=True):
        assert other.seconds >= one.seconds * (1 - 1e-9)


@given(SIZES, SOFTWARE, st.integers(1, 9), st.integers(1, 9), st.integers(1, 100), st.integers(1, 100))
@settings(max_examples=25, deadline=None)
def test_more_prompts_never_take_less(
    sizes: tuple[int, int, int], software: Software, prompts: int, more: int, asked: int, said: int
) -> None:
    dp, tp, pp = sizes
    cluster = replace(read_cluster("16xA100-80G"), software=software)
    layout = Layout.on(range(dp * tp * pp), dp, tp, pp)
    few, many = (
        all_calls(a_workload(count, 2, Lengths.fixed(asked), Lengths.fixed(said)), cluster, layout)
        for count in (prompts, prompts + more)
    )
    for one, other in zip(few, many, strict=True):
        assert other.seconds >= one.seconds * (1 - 1e-9)


@given(SOFTWARE, st.integers(1, 40), st.integers(1, 100), st.sampled_from([2, 4, 8]))
@settings(max_examples=25, deadline=None)
def test_copies_never_gain_more_than_their_number(software: Software, prompts: int, said: int, dp: int) -> None:
    cluster = replace(read_cluster("8xA100-80G"), software=software)
    workload = a_workload(prompts, 2, Lengths.fixed(32), Lengths.fixed(said))
    one, many = (all_calls(workload, cluster, Layout.on(range(n), dp=n)) for n in (1, dp))
    for alone, shared in zip(one, many, strict=True):
        assert shared.seconds >= alone.seconds / dp * (1 - 1e-9)


@given(SIZES, SIZES, st.booleans())
@settings(max_examples=15, deadline=None)
def test_moves_are_free_only_where_nothing_moves(
    source: tuple[int, int, int], target: tuple[int, int, int], apart: bool
) -> None:
    workload = a_workload(1, 1, Lengths.fixed(1), Lengths.fixed(1))
    costs = ModelCosts(workload, dict.fromkeys(FLOW.roles, SHAPE), FLOW, read_cluster("32xA100-80G"))
    number = lambda sizes: sizes[0] * sizes[1] * sizes[2]
    first = 16 if apart else 0
    held, needed = Layout.on(range(number(source)), *source), Layout.on(range(first, first + number(target)), *target)
    found = costs.move("actor", held, needed)
    assert found.seconds == pytest.approx(sum(found.terms.values()))
    assert (found.bytes > 0) <= (found.seconds > 0)
    if apart:
        assert found.bytes >= 2 * 2 * SHAPE.vocabulary * SHAPE.hidden
    if held == needed:
        assert (found.seconds, found.bytes) == (0.0, 0)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 12))
def test_every_token_but_the_first_is_a_row_of_a_step(lengths: list[int], running: int) -> None:
    pieces = profile(tuple(lengths), running)
    assert sum(one.steps * one.running for one in pieces) == sum(length - 1 for length in lengths)
    assert max((one.running for one in pieces), default=0) <= running
    assert sum(one.steps for one in pieces) >= max(lengths) - 1


def test_samples_start_as_others_end() -> None:
    """Two at a time of 3, 5 and 2 steps: the third runs from the third step on, beside the second."""
    pieces = profile((4, 6, 3), 2)
    assert [(one.steps, one.running) for one in pieces] == [(3, 2), (2, 2)]
    assert [one.said for one in pieces] == [2 * 2.0, 4.5 + 1.5]


def test_prompts_are_dealt_with_all_their_samples() -> None:
    shares = dealt(list(range(1, 13)), 2, 3)
    assert [len(share) for share in shares] == [4, 4, 4]
    assert sorted(length for share in shares for length in share) == list(range(1, 13))


@given(LENGTHS)
def test_quantiles_are_lengths(lengths: Lengths) -> None:
    assert len(lengths.of(7)) == 7
    assert set(lengths.of(7)) <= set(lengths.values)
