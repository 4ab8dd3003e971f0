"""Samples that are drawn from prompts made of other samples: their place in the graph, how many there are, who waits
for whom, and every mistake."""

from __future__ import annotations

import pytest

from plait.dataflow import CallKind, Resample, build_prompts, parse_grades, per_group, trace
from plait.dataflow.made_rows import made_from, prompts_each, source_of
from plait.errors import FlowError
from plait.schedule.needs import early_scores, needs_of

ROLES = ["actor", "ref", "judge", "reward"]


def asks(prompts, completions):
    return prompts


def reads(completions, verdicts):
    return [float(len(texts)) for texts in verdicts]


def loss(batch, advantages=None):
    return batch


def debated(prompts, actor, judge, ref):
    """Nodes: 0 samples, 1 and 2 what the judge says, 3 and 4 second attempts, 5 grades of the first, 6 advantages."""
    samples = actor.generate(prompts)
    verdicts = judge.generate(build_prompts(samples, asks), samples_per_prompt=3, max_tokens=5)
    again = actor.generate(build_prompts(verdicts, asks, name="again"), samples_per_prompt=2)
    grades = parse_grades(samples, reads, verdicts=verdicts)
    actor.train(samples, loss=loss, advantages=per_group(max, grades, name="advantages"))
    actor.train(again, loss=loss, advantages=ref.logprobs(again))


def test_the_graph_of_a_debate():
    flow = trace(debated, roles=ROLES)
    drawn = "sampling_logprobs[token], finished[sample], tokens_left[sample]"
    assert str(flow).splitlines() == [
        f"0 actor.generate  per sample  (0) -> {drawn}",
        "1 asks  per group  (0) -> prompts",
        f"2 judge.generate  per sample  (prompts=1) -> {drawn}",
        "3 again  per group  (2) -> prompts",
        f"4 actor.generate#2  per sample  (prompts=3) -> {drawn}",
        "5 reads  per group  (verdicts=2) -> reads[sample]",
        "6 advantages  per group  (0=5) -> advantages[sample]",
        "7 actor.train  per batch  (advantages=6) -> weights",
        "8 ref.logprobs  per sample  (4) -> ref_logprobs[token]",
        "9 actor.train#2  per batch  (advantages=8) -> weights",
    ]
    assert [node.id for node in flow.of_kind(CallKind.GENERATE)] == [0, 2, 4]
    assert [node.id for node in flow.of_step_prompts] == [0]
    assert made_from(flow.nodes, 4) == [2, 0]
    assert source_of(flow, 4) is source_of(flow, 0) is flow.nodes[0]
    assert flow.nodes[2].generation.limit(100) == 5
    assert flow.nodes[4].generation.limit(100) == 100


def test_how_many_prompts_they_are():
    """Of a step with one prompt and the recipe's 8 samples of each: 8 for the judge, 24 for the second attempts."""
    flow = trace(debated, roles=ROLES)
    assert [prompts_each(flow, flow.nodes[number], 8) for number in (0, 2, 4)] == [1, 8, 24]


def test_pairs_are_two_samples_of_a_prompt():
    def flow(prompts, pairs, actor, judge):
        judge.generate(build_prompts(pairs, asks))
        actor.train(actor.generate(prompts), loss=loss)

    traced = trace(flow, roles=ROLES)
    assert prompts_each(traced, traced.nodes[2], 8) == 2
    assert source_of(traced, 2).call == "pairs"


def test_who_waits_for_whom():
    """A rollout for the prompts that are made for it, grades for the texts that they read, and each rollout for those
    before it."""
    needs = needs_of(trace(debated, roles=ROLES), ())
    assert needs[1] == {0}
    assert needs[2] == {0, 1}
    assert needs[4] == {0, 2, 3}
    assert needs[5] == {0, 2}


def test_scores_of_what_is_not_drawn_ahead_are_not_early():
    def flow(prompts, actor, judge, ref):
        samples = actor.generate(prompts)
        verdicts = judge.generate(build_prompts(samples, asks))
        actor.train(samples, loss=loss, advantages=ref.logprobs(samples))
        actor.train(verdicts, loss=loss, advantages=ref.logprobs(verdicts))

    traced = trace(flow, roles=ROLES)
    early = early_scores(traced, needs_of(traced, ()), {"ref", "judge"})
    assert [traced.nodes[number].call for number in early] == ["ref.logprobs"]


def resampled(prompts, actor, judge, reward):
    samples = actor.generate(prompts)
    verdicts = judge.generate(build_prompts(samples, asks), resample=Resample(keep=bool, reward=reward))
    actor.train(samples, loss=loss, advantages=reward.score(verdicts))


def of_no_tokens(prompts, actor, judge):
    judge.generate(build_prompts(actor.generate(prompts), asks), max_tokens=0)


def graded_by_others(prompts, actor, judge):
    samples, others = actor.generate(prompts), actor.generate(prompts)
    parse_grades(samples, reads, verdicts=judge.generate(build_prompts(others, asks)))


def graded_by_themselves(prompts, actor):
    samples = actor.generate(prompts)
    parse_grades(samples, reads, verdicts=samples)


def graded_without_texts(prompts, actor):
    parse_grades(actor.generate(prompts), reads, verdict=actor.generate(prompts))


def graded_under_a_metric(prompts, actor):
    parse_grades(actor.generate(prompts), asks, name="timing_s/mine")


def graded_under_a_column(prompts, actor):
    parse_grades(actor.generate(prompts), asks, name="response")


def no_samples(prompts, actor):
    parse_grades(prompts, asks)


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        (resampled, r"judge.generate\(resample=…\) draws further prompts of the data, but its prompts are made of"),
        (of_no_tokens, "judge.generate: max_tokens must be at least 1, found 0"),
        (graded_by_others, r"parse_grades\(reads\)\(verdicts=…\) takes samples that were drawn from prompts made of"),
        (
            graded_by_themselves,
            r"parse_grades\(reads\)\(verdicts=…\) takes samples that were drawn from prompts made of",
        ),
        (
            graded_without_texts,
            r"parse_grades\(reads\)\(verdict=…\) takes samples that were drawn from prompts made of",
        ),
        (graded_under_a_metric, "timing_s"),
        (graded_under_a_column, r"parse_grades\(asks\): a sample has a column `response` already"),
        (no_samples, r"parse_grades\(asks\) takes samples \(what `generate` returns\), not prompts"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_mistake_is_named(flow, message):
    with pytest.raises(FlowError, match=message):
        trace(flow, roles=ROLES)
