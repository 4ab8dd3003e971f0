"""How busy a rank was, and how old samples are, by hand."""

from __future__ import annotations

import pytest

from plait.dataflow import CallKind, trace
from plait.runtime.steps.off_policy import idle_ratio, idle_ratios, off_policy_metrics
from plait.schedule.plan import Placement, Plan
from plait.schedule.timeline import Span, Timeline, covered_s
from tests.runtime.samples import whole_batch

SPANS = (
    Span("a", "DECODE", 0, 0.0, 2.0),
    Span("b", "DECODE", 0, 1.0, 3.0),
    Span("c", "TRAIN", 1, 6.0, 7.0),
    Span("m", "SEND", 1, 0.0, 10.0, lane="link"),
    Span("f", "SCORE", 0, 0.0, 10.0, lane="reward worker 0"),
)


def test_seconds_in_several_intervals_count_once() -> None:
    assert covered_s([(1, 3), (0, 2), (5, 6), (5.5, 5.6)]) == pytest.approx(4)
    assert covered_s([]) == 0


def test_a_rank_is_idle_while_it_computes_nothing() -> None:
    timeline = Timeline(SPANS)
    assert idle_ratio(timeline, 0, 10.0) == pytest.approx(0.7)
    assert idle_ratio(timeline, 1, 10.0) == pytest.approx(0.9)
    assert idle_ratio(timeline, 2, 10.0) == 1.0


def test_each_side_is_the_mean_of_its_ranks() -> None:
    places = (
        Placement("actor.generate", "decode", (0, 2), dp=2),
        Placement("actor.train", "train", (1,)),
        Placement("critic.train", "train", (0,)),
    )
    found = idle_ratios(Timeline(SPANS), Plan("apart", 3, places), 10.0)
    assert found == {"rollouter": pytest.approx(0.85), "trainer": pytest.approx(0.8)}


def loss(batch):
    return batch


def trained(prompts, actor, ref):
    actor.train(actor.generate(prompts), loss=loss)


def watched(prompts, examples, actor, ref):
    actor.generate(prompts)
    actor.train(examples, loss=loss)


def taught(prompts, actor, ref):
    actor.train(ref.generate(prompts), loss=loss)


@pytest.mark.parametrize(("flow", "lag"), [(trained, 3), (watched, None), (taught, None)])
def test_samples_are_old_where_they_train_the_role_that_drew_them(flow, lag) -> None:
    """They are of version 2, and the step begins with version 5."""
    graph = trace(flow, roles=["actor", "ref"])
    state = whole_batch(5, graph.of_kind(CallKind.GENERATE)[0].id, 7, 8)
    metrics = off_policy_metrics(graph, state, (), 3)
    assert (metrics.get("off_policy/max"), metrics.get("off_policy/mean")) == (lag, lag)
    assert ("off_policy/mixed" in metrics) == (lag is not None)
    if flow is not taught:
        with pytest.raises(AssertionError, match="are 3 versions old, and 2 may be"):
            off_policy_metrics(graph, state, (), 2)
