"""Rows and COMPUTE nodes: hand-made samples of two prompts, three and two responses, arriving out of order."""

from __future__ import annotations

import numpy as np
import pytest

from plait.data.computing import evaluate, spread_to, trained_rows
from plait.data.experts import Experts
from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import Rows
from plait.dataflow import Column, Dataflow, Level, Node, per_batch, per_group, per_sample, trace
from plait.errors import RunError

PROMPTS = {uid: Prompt(uid, f"p{uid}", (1, 2)) for uid in (4, 7)}


def sample(uid: int, index: int, length: int) -> Sample:
    logprobs = tuple(-0.1 * (uid + index + k) for k in range(length))
    return Sample(PROMPTS[uid], index, tuple(range(length)), logprobs, "", FinishReason.STOP)


# Arrival order: 7.1 (1 token), 4.0 (3), 7.0 (2), 4.2 (0), 4.1 (2).
SAMPLES = (sample(7, 1, 1), sample(4, 0, 3), sample(7, 0, 2), sample(4, 2, 0), sample(4, 1, 2))
SCORE = Column("reward_score", Level.SAMPLE, 1, 0)
LOGPROBS = Column("sampling_logprobs", Level.TOKEN, 0, 0)


def rows() -> Rows:
    return (
        Rows(SAMPLES)
        .with_column(SCORE, [71.0, 40.0, 70.0, 42.0, 41.0])
        .with_column(LOGPROBS, [0.0, 10.0, 11.0, 12.0, 20.0, 21.0, 40.0, 41.0])
    )


def test_offsets_groups_and_order():
    table = rows()
    assert table.offsets.tolist() == [0, 1, 4, 6, 6, 8]
    assert table.num_tokens == 8
    assert table.groups == {7: (2, 0), 4: (1, 4, 3)}
    ordered = table.ordered()
    assert [s.uid for s in ordered.samples] == ["4.0", "4.1", "4.2", "7.0", "7.1"]
    assert ordered.columns[SCORE].tolist() == [40, 41, 42, 70, 71]
    assert ordered.columns[LOGPROBS].tolist() == [10, 11, 12, 40, 41, 20, 21, 0]


@pytest.mark.parametrize(
    ("told", "root"),
    [((), 50), ((99, 99), 50), ((40, 99), 40), ((32, 99), 32), ((31, 99), 0), ((99, None), 0)],
)
def test_what_prompts_begin_with_ends_where_their_tokens_went_to_other_experts(told, root):
    """Prompts of 60 tokens, the first 50 alike, two numbers a token; those of one token of one prompt are others."""
    samples = []
    for uid, first in enumerate(told or (None, None)):
        numbers = bytearray(120)
        if first is not None and first < 60:
            numbers[2 * first + 1] = 3
        experts = None if first is None else Experts(bytes(numbers), b"")
        tokens = (*range(50), *range(100 * uid, 100 * uid + 10))
        samples.append(Sample(Prompt(uid, "", tokens), 0, (7,), (-1.0,), "", FinishReason.STOP, experts=experts))
    assert Rows(tuple(samples)).with_root().root_tokens == root


def test_select_takes_every_column_along():
    part = rows().select([4, 0])
    assert [s.uid for s in part.samples] == ["4.1", "7.1"]
    assert part.columns[SCORE].tolist() == [41, 71]
    assert part.columns[LOGPROBS].tolist() == [40, 41, 0]
    assert part.sampling_logprobs.tolist() == pytest.approx([-0.5, -0.6, -0.8])
    assert len(rows().select([])) == 0
    assert rows().select([]).columns[LOGPROBS].shape == (0,)


def test_samples_whose_keep_is_zero_or_not_a_number_are_left_out():
    def flow(prompts, actor, reward):
        samples = actor.generate(prompts)
        actor.train(samples, loss=lambda batch: batch.logprobs.sum(), keep=reward.score(samples))

    train = trace(flow, roles=["actor", "reward"]).nodes[-1]
    assert train.keep is not None
    table = Rows(SAMPLES).with_column(train.keep, [0.0, 1.0, np.nan, np.inf, -0.5])
    assert [s.uid for s in trained_rows(train, {train.rows: table}).samples] == ["4.0", "4.2", "4.1"]


def test_columns_are_checked():
    with pytest.raises(AssertionError, match=r"reward_score\[sample\]: expected shape \(5,\), found \(4,\)"):
        Rows(SAMPLES).with_column(SCORE, [1.0] * 4)
    with pytest.raises(AssertionError, match="same sample"):
        Rows((SAMPLES[0], SAMPLES[0]))


def graph(make) -> tuple[Node, dict[int, Rows]]:
    """Trace a flow around `make(samples, score)` and return its COMPUTE node and the rows it runs on."""

    def flow(prompts, actor, reward):
        samples = actor.generate(prompts)
        column = make(samples, reward.score(samples))
        actor.train(samples, loss=lambda batch, x: x, x=column)

    flow_graph = trace(flow, roles=["actor", "reward"])
    return flow_graph.nodes[2], {0: rows()}


def double(score: float) -> float:
    assert type(score) is float
    return 2 * score


def test_per_sample_number():
    node, tables = graph(lambda samples, score: per_sample(double, score, name="x"))
    assert evaluate(node, tables).tolist() == [142, 80, 140, 84, 82]


def test_per_sample_tokens_and_constants():
    def shape(score, logprobs, scale):
        return scale * (logprobs + score)

    node, tables = graph(lambda s, score: per_sample(shape, score, s.logprobs, name="x", level=Level.TOKEN, scale=2.0))
    assert evaluate(node, tables).tolist() == [142, 100, 102, 104, 180, 182, 162, 164]


def test_per_group_is_in_sample_index_order():
    seen = []

    def rank(scores, logprobs):
        seen.append((scores.tolist(), [part.tolist() for part in logprobs]))
        return np.arange(len(scores))

    node, tables = graph(lambda s, score: per_group(rank, score, s.logprobs, name="x"))
    assert evaluate(node, tables).tolist() == [1, 0, 0, 2, 1]
    assert seen == [([70, 71], [[20, 21], [0]]), ([40, 41, 42], [[10, 11, 12], [40, 41], []])]


def test_per_group_and_per_batch_token_columns():
    def lengths(logprobs):
        return [np.full(len(part), float(len(part))) for part in logprobs]

    for make in (per_group, per_batch):
        node, tables = graph(lambda s, score, make=make: make(lengths, s.logprobs, name="x", level=Level.TOKEN))
        assert evaluate(node, tables).tolist() == [1, 3, 3, 3, 2, 2, 2, 2]


def test_per_batch_whitens():
    node, tables = graph(lambda s, score: per_batch(lambda r: r - r.mean(), score, name="x"))
    assert evaluate(node, tables).tolist() == pytest.approx([18.2, -12.8, 17.2, -10.8, -11.8])


def test_a_function_cannot_change_a_column_in_place():
    def spoil(logprobs):
        logprobs *= 0
        return 0.0

    node, tables = graph(lambda s, score: per_sample(spoil, s.logprobs, name="x"))
    evaluate(node, tables)
    assert tables[0].columns[LOGPROBS].sum() == 155


def wrong(value):
    def liar(*_):
        return value

    return liar


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda s, r: per_sample(wrong(float("nan")), r, name="x"),
            r"per_sample\(liar\) -> x\[sample\], sample 7\.1: expected finite numbers, found nan",
        ),
        (
            lambda s, r: per_sample(wrong(np.zeros(2)), r, name="x"),
            r"per_sample\(liar\) -> x\[sample\], sample 7\.1: expected one number \(.*Level\.TOKEN.*an array of shape",
        ),
        (lambda s, r: per_sample(wrong(None), r, name="x"), r"sample 7\.1: expected one number \(.*, found None"),
        (lambda s, r: per_sample(wrong("one"), r, name="x"), r"sample 7\.1: expected one number \(.*, found 'one'"),
        (
            lambda s, r: per_sample(wrong(np.zeros(9)), r, name="x", level=Level.TOKEN),
            r"sample 7\.1: expected one number per response token \(1\), found an array of shape \(9,\)",
        ),
        (
            lambda s, r: per_group(wrong(np.zeros(3)), r, name="x"),
            r"per_group\(liar\) -> x\[sample\], prompt 7: expected one number per sample \(2\), found .* \(3,\)",
        ),
        (
            lambda s, r: per_group(wrong([np.zeros(2), np.zeros(5)]), r, name="x", level=Level.TOKEN),
            r"prompt 7, 7\.1: expected one number per response token \(1\), found an array of shape \(5,\)",
        ),
        (
            lambda s, r: per_group(wrong([np.zeros(2)]), r, name="x", level=Level.TOKEN),
            r"prompt 7: expected a list with one array per sample \(2\), found 1",
        ),
        (
            lambda s, r: per_batch(wrong(0.0), r, name="x"),
            r"per_batch\(liar\) -> x\[sample\], the whole batch: expected one number per sample \(5\)",
        ),
        (lambda s, r: per_batch(wrong([1.0, 2.0, float("inf"), 3, 4]), r, name="x"), r"whole batch: .* found inf"),
    ],
)
def test_a_wrong_result_names_function_and_sample(make, message):
    node, tables = graph(make)
    with pytest.raises(RunError, match=message):
        evaluate(node, tables)


def remax_graph(fn, grain=per_sample) -> Dataflow:
    def flow(prompts, actor, reward):
        samples = actor.generate(prompts)
        greedy = actor.generate(prompts, greedy=True, samples_per_prompt=1)
        advantages = grain(fn, reward.score(samples), reward.score(greedy), name="advantages")
        actor.train(samples, loss=lambda batch, advantages: advantages, advantages=advantages)

    return trace(flow, roles=["actor", "reward"])


def greedy_rows(flow: Dataflow, *uids: int) -> tuple[Column, dict[int, Rows]]:
    mine, baseline = flow.nodes[4].inputs.values()
    table = Rows(SAMPLES).with_column(mine, [71.0, 40.0, 70.0, 42.0, 41.0])
    other = Rows(tuple(sample(uid, i, 1) for i, uid in enumerate(uids))).with_column(
        baseline, [100.0 * u for u in uids]
    )
    return baseline, {0: table, 1: other}


def test_a_baseline_of_other_samples_is_matched_by_prompt():
    flow = remax_graph(lambda score, baseline: score - baseline)
    baseline, tables = greedy_rows(flow, 4, 7)
    assert evaluate(flow.nodes[4], tables).tolist() == [-629, -360, -630, -358, -359]
    assert spread_to(baseline, tables[1], tables[0], flow.nodes[-1]).tolist() == [700, 400, 700, 400, 400]
    grouped = remax_graph(lambda scores, baselines: scores - baselines.mean(), per_group)
    _, tables = greedy_rows(grouped, 4, 7)
    assert evaluate(grouped.nodes[4], tables).tolist() == [-629, -360, -630, -358, -359]


@pytest.mark.parametrize("uids", [(4,), (4, 4, 7, 7)])
def test_an_ambiguous_baseline_is_refused(uids):
    flow = remax_graph(lambda score, baseline: score - baseline)
    _, tables = greedy_rows(flow, *uids)
    with pytest.raises(RunError, match=r"exactly one of them for prompt 7, found [02]; .*samples_per_prompt=1"):
        evaluate(flow.nodes[4], tables)
