"""Seconds of drawing where prompts come from elsewhere, by hand and against drawing where they are computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from plait.cost.costs import Spread
from plait.cost.layer_times import total
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.prompts_apart import WAITING, Source, arrivals, drawn, least_s, sent_s, tokens_sent
from plait.cost.workload import Workload
from plait.layout.mesh import Layout
from tests.cost.test_model_costs import WORK, a_cluster, costs_of

ONE_S: Any = SimpleNamespace(
    tokens=1.0, step=lambda running, said: {"layers": 1.0}, alone_s=lambda length: length - 1.0
)
"""A step of any samples takes a second."""


def test_prompts_are_sent_when_their_step_has_ended() -> None:
    """Four of ten tokens in two steps of 3 s; three in two of 20 tokens, of which the second is half as long; one that
    takes two steps; long prompts, each in more than one step; what is sent more slowly than it is computed."""
    assert arrivals([Source(4, 6.0, 10, 20, 0.5)]) == pytest.approx([3 + 2 * 0.5] * 2 + [6 + 2 * 0.5] * 2)
    assert arrivals([Source(3, 6.0, 10, 20, 0.0)]) == pytest.approx([4, 4, 6])
    assert arrivals([Source(1, 6.0, 10, 5, 0.5)]) == pytest.approx([6.5])
    assert arrivals([Source(2, 6.0, 30, 20, 0.0)]) == pytest.approx([4, 6])
    assert arrivals([Source(3, 3.0, 10, 10, 2.0)]) == pytest.approx([3, 5, 7])
    assert arrivals([Source(3, 3.0, 10, 10, 0.5, begun_s=4.0)]) == pytest.approx([5.5, 6.5, 7.5]), "it packs first"


def test_pairs_of_ranks_share_the_link_between_nodes() -> None:
    """10**6 bytes from two ranks to two: at half of 10**8 in a second by two links of a node, at half of 10**7 by one
    from node to node."""
    source, near, far = (Layout.on(ranks, tp=2) for ranks in ((0, 1), (2, 3), (4, 5)))
    cluster = a_cluster(8, nodes=2)
    assert sent_s(cluster, source, near, 1e6) == pytest.approx(1e-4 + 1e6 / 2 / 0.5e8)
    assert sent_s(cluster, source, far, 1e6) == pytest.approx(1e-3 + 1e6 / 0.5e7)
    assert sent_s(cluster, source, Layout.on((2,)), 1e6) == pytest.approx(1e-4 + 1e6 / 0.5e8)


def test_several_instances_compute_prompts() -> None:
    """And one that has none."""
    assert arrivals([Source(1, 6.0, 9, 9, 0.5), Source(1, 2.0, 9, 9, 0.5), Source(0, 0.0, 9, 9, 0.5)]) == [2.5, 6.5]


def test_samples_begin_when_their_prompt_is_there() -> None:
    """The first token is two steps on its way: prompts of 1 s and 9 s begin at 3 and 11. One of 5 tokens takes 4 s
    from there; the other ends at 11 + 2."""
    terms = drawn([5, 3], [1.0, 9.0], 8, ONE_S)
    assert terms[WAITING] == pytest.approx(3 + (11 - 7))
    assert total(terms) == pytest.approx(13)
    assert total(drawn([5, 3], [1.0, 1.0], 8, ONE_S)) == pytest.approx(3 + 4)


def test_samples_do_not_end_before_their_prompt_is_there() -> None:
    """However many draw: prompts of 1 s and 9 s, with samples of up to 8 and of 3 tokens, two steps on their way."""
    assert least_s([8, 5, 3, 2], [1.0, 9.0], ONE_S) == pytest.approx(max(3 + 7, 11 + 2))


def test_who_gives_samples_away_waits_for_the_last_prompt() -> None:
    """One of two instances has the prompt that comes late, and its samples cannot end sooner elsewhere."""
    lengths = SampleLengths(Lengths.fixed(500), Lengths.fixed(4))
    cost = costs_of(Workload(2, 1, lengths, max_prefill_tokens=500, rebalances=True), a_cluster(3)).call(
        "actor.generate", "decode", PAIR_OF_OTHERS, spread=Spread((ONE,), (PAIR_OF_OTHERS,))
    )
    assert all(seconds >= 0 for seconds in cost.terms.values())
    prompts = costs_of(Workload(2, 1, lengths), a_cluster(3)).call("actor.generate", "prefill", ONE)
    assert min(cost.instance_seconds) >= prompts.seconds


def test_a_sample_waits_for_a_place() -> None:
    assert total(drawn([5, 3, 2], [1.0], 1, ONE_S)) == pytest.approx(3 + 4 + 2 + 1)
    assert total(drawn([5, 3, 2], [1.0], 2, ONE_S)) == pytest.approx(3 + max(4, 2 + 1))
    assert total(drawn([1, 1], [1.0], 2, ONE_S)) == pytest.approx(3), "their first tokens are all that they have"


def test_no_more_is_on_its_way_than_there_is() -> None:
    assert tokens_sent(100, 8, 300, 1) == 300
    assert tokens_sent(100, 8, 300, 4) == 800
    assert tokens_sent(400, 8, 300, 1) == 400


def test_drawing_apart_takes_the_steps_of_drawing_and_no_prompts() -> None:
    costs = costs_of(WORK, a_cluster(2))
    first, second = Layout.on((0,)), Layout.on((1,))
    elsewhere = Spread((second,), (first,))
    prompts = costs.call("actor.generate", "prefill", second, spread=elsewhere)
    apart = costs.call("actor.generate", "decode", first, spread=elsewhere)
    together = costs.call("actor.generate", "decode", first)
    assert prompts.terms["prompts"] == pytest.approx(together.terms["prompts"])
    assert "prompts" not in apart.terms
    assert apart.terms[WAITING] >= prompts.seconds
    decoding = together.seconds - together.terms["prompts"]
    assert apart.seconds - apart.terms[WAITING] == pytest.approx(decoding, rel=0.05)
    assert prompts.working_bytes < apart.working_bytes


ONE, PAIR = Layout.on((0,)), Layout.on((0, 1), dp=2)
PAIR_OF_OTHERS = Layout.on((1, 2), dp=2)
WAYS = {
    "alike": (
        Spread((PAIR,), (Layout.on((2, 3), dp=2),)),
        Spread((ONE, Layout.on((1,))), (Layout.on((2,)), Layout.on((3,)))),
    ),
    "prompts": (Spread((PAIR,), (Layout.on((2,)),)), Spread((ONE, Layout.on((1,))), (Layout.on((2,)),))),
    "samples": (Spread((ONE,), (Layout.on((2, 3), dp=2),)), Spread((ONE,), (Layout.on((2,)), Layout.on((3,))))),
}


@pytest.mark.parametrize("name", WAYS)
def test_instances_of_several_placements_are_those_of_one(name: str) -> None:
    """Each has its share of the prompts, or of their samples, in seconds and bytes."""
    costs = costs_of(WORK, a_cluster(4))
    one, several = WAYS[name]
    for mode, together, apart in (("prefill", one.prompts, several.prompts), ("decode", one.samples, several.samples)):
        whole = costs.call("actor.generate", mode, together[0], spread=one)
        parts = [costs.call("actor.generate", mode, layout, spread=several) for layout in apart]
        assert {part.working_bytes for part in parts} == {whole.working_bytes}
        by_instance = [seconds for part in parts for seconds in part.instance_seconds]
        assert by_instance == pytest.approx(list(whole.instance_seconds))


def test_an_instance_without_a_prompt_does_nothing() -> None:
    """Four prompts; of six instances that compute them two have none."""
    costs = costs_of(WORK, a_cluster(8))
    six = Layout.on(range(6), dp=6)
    cost = costs.call("actor.generate", "prefill", six, spread=Spread((six,), (Layout.on((6,)),)))
    assert [seconds > 0 for seconds in cost.instance_seconds] == [True] * 4 + [False] * 2


def test_samples_that_go_where_they_end_sooner_do_so_where_prompts_are_computed_elsewhere() -> None:
    """Instances end together, when all has been done by both; what they wait for prompts stays."""
    draws, lengths = Layout.on((1, 2), dp=2), SampleLengths(Lengths.fixed(8), Lengths.recorded(range(20, 180, 20)))
    apart = Spread((Layout.on((0,)),), (draws,))
    cost, level = (
        costs_of(Workload(8, 1, lengths, max_running=1, rebalances=rebalances), a_cluster(3)).call(
            "actor.generate", "decode", draws, spread=apart
        )
        for rebalances in (False, True)
    )
    assert len(set(cost.instance_seconds)) == 2, "one has longer samples"
    assert level.instance_seconds == pytest.approx([sum(cost.instance_seconds) / 2] * 2)
    assert total(level.terms) == pytest.approx(level.seconds)
    assert level.terms[WAITING] == pytest.approx(cost.terms[WAITING])
