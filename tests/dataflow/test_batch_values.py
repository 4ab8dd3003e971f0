"""Values for the whole batch, values kept from step to step, given samples: their graph, their evaluation."""

from __future__ import annotations

import numpy as np
import pytest

from plait.data.computing import evaluate
from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import Rows
from plait.dataflow import CallKind, Level, Resample, TrainOptions, carried, per_batch, per_sample, trace
from plait.errors import FlowError

ROLES = ["actor", "reward", "critic"]


def loss(batch, scores):
    return batch


def next_scale(scale, mean):
    return scale + mean


def scaled(score, scale):
    return score * scale


def flow(prompts, actor, reward):
    samples = actor.generate(prompts)
    scores = reward.score(samples)
    scale = carried("scale", start=2.0)
    mean = per_batch(np.mean, scores, name="mean_score", level=Level.BATCH)
    actor.train(samples, loss=loss, scores=per_sample(scaled, scores, scale, name="scaled"))
    scale.becomes(per_batch(next_scale, scale, mean, name="next_scale", level=Level.BATCH))


def test_the_graph_of_a_carried_value():
    graph = trace(flow, roles=ROLES)
    node = {node.call: node for node in graph.nodes}
    assert node["scale"].kind is CallKind.CARRIED
    assert node["scale"].start == 2.0
    assert str(node["mean_score"].outputs[0]) == "mean_score[batch]"
    assert node["scaled"].rows == node["actor.generate"].id, "the rows are those of the column that has some"
    assert node["next_scale"].rows == node["next_scale"].id, "a value made of values belongs to no rows"
    assert node["scale.becomes"].kind is CallKind.BECOMES
    assert node["scale.becomes"].carried == node["scale"].id


def test_values_for_the_whole_batch_reach_functions_as_floats():
    graph = trace(flow, roles=ROLES)
    node = {node.call: node for node in graph.nodes}
    prompt = Prompt(0, "p", (1,))
    samples = tuple(Sample(prompt, i, (5, 6), (), "t", FinishReason.STOP) for i in range(2))
    rows = Rows(samples).with_column(node["reward.score"].outputs[0], [1.0, 4.0])
    tables = {node["actor.generate"].id: rows}
    batch = {node["scale"].outputs[0]: np.array(2.0)}
    batch[node["mean_score"].outputs[0]] = evaluate(node["mean_score"], tables, batch)
    assert batch[node["mean_score"].outputs[0]] == 2.5
    assert evaluate(node["next_scale"], tables, batch) == 4.5
    assert evaluate(node["scaled"], tables, batch).tolist() == [2.0, 8.0]
    assert np.isnan(rows.sampling_logprobs).all(), "given samples have no sampling log-probs"
    assert len(rows.sampling_logprobs) == 4


def test_given_samples():
    def preferences(pairs, actor, critic):
        critic.train(pairs, loss=lambda batch: batch, whole_groups=True, mask=pairs.trained, after=3)

    graph = trace(preferences, roles=ROLES)
    read, train = graph.nodes
    assert (read.call, read.kind, str(read.outputs[0])) == ("pairs", CallKind.READ, "trained[token]")
    assert train.inputs == {"mask": read.outputs[0]}
    assert train.training == TrainOptions(whole_groups=True, after=3)
    assert [graph.optimizer_steps("critic", steps) for steps in (1, 3, 5)] == [0, 0, 2]


def test_dynamic_sampling_names_the_role_that_decides():
    def dynamic(prompts, actor, reward):
        samples = actor.generate(prompts, resample=Resample(np.any, reward, 4))
        actor.train(samples, loss=loss, scores=reward.score(samples))

    node = trace(dynamic, roles=ROLES).nodes[0]
    assert node.generation.resample == Resample(np.any, "reward", 4)


def becomes_a_column(prompts, actor, reward):
    carried("scale", start=1.0).becomes(reward.score(actor.generate(prompts)))


def becomes_twice(prompts, actor):
    value = carried("scale", start=1.0)
    value.becomes(value)
    value.becomes(value)


def same_name(prompts):
    carried("scale", start=1.0)
    carried("scale", start=1.0)


def no_number(prompts):
    carried("scale", start=float("nan"))


def per_sample_for_the_batch(prompts, actor, reward):
    per_sample(scaled, reward.score(actor.generate(prompts)), name="x", level=Level.BATCH)


def samples_of_nothing(prompts):
    per_batch(scaled, carried("scale", start=1.0), name="x")


def mask_of_samples(prompts, actor, reward):
    samples = actor.generate(prompts)
    actor.train(samples, loss=lambda batch: batch, mask=reward.score(samples))


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        (becomes_a_column, r"becomes takes one value for the whole batch, not reward_score\[sample\]"),
        (becomes_twice, "becomes two things in one step"),
        (same_name, "another call of the flow has this name"),
        (no_number, "starts with finite numbers, found nan"),
        (per_sample_for_the_batch, "cannot make one value for the whole batch; use per_batch"),
        (samples_of_nothing, "makes one number per sample, but reads no column of samples"),
        (mask_of_samples, r"actor.train\(mask=…\) takes one number per token, not reward_score\[sample\]"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_mistake_is_named(flow, message):
    with pytest.raises(FlowError, match=message):
        trace(flow, roles=ROLES)


def test_a_carried_value_belongs_inside_a_flow():
    with pytest.raises(FlowError, match="belongs inside a flow"):
        carried("scale", start=1.0)
