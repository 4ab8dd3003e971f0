"""How long samples are predicted to be that are made of others, and that a prediction counts them so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.cost.call_lengths import lengths_by_call
from plait.cost.estimate import Arithmetic
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.model_costs import ModelCosts
from plait.cost.workload import Samples, Workload
from plait.dataflow import Dataflow, build_prompts, trace
from plait.layout.mesh import Layout
from plait.policy.packing import GroupTokens
from plait.recipes.recipe import Recipe
from plait.simulator.step_graph import StepGraph
from tests.cost.test_model_costs import SHAPE, WORK, a_cluster

LENGTHS = SampleLengths(Lengths.recorded([10, 20, 30]), Lengths.recorded([4, 8]))


def asks(prompts):
    return prompts


def asks_again(prompts, critiques):
    return prompts


def judged(count: int = 3, most: int | None = 5) -> Dataflow:
    """Nodes: 0 samples, 1 and 2 verdicts, 3 and 4 what is said of these, 5 and 6 trainings."""

    def flow(prompts, actor, judge):
        samples = actor.generate(prompts)
        verdicts = judge.generate(build_prompts(samples, asks), samples_per_prompt=count, max_tokens=most)
        again = actor.generate(build_prompts(verdicts, asks, name="again"), samples_per_prompt=1)
        actor.train(samples, loss=lambda batch: batch)
        actor.train(again, loss=lambda batch: batch)

    return trace(flow, roles=["actor", "judge"])


def plain(count: int) -> Dataflow:
    def flow(prompts, judge, actor):
        verdicts = judge.generate(prompts, samples_per_prompt=count)
        actor.train(verdicts, loss=lambda batch: batch)

    return trace(flow, roles=["actor", "judge"])


def test_a_prompt_is_as_long_as_the_sample_that_it_is_made_of():
    """Quantile by quantile: 10 + 4, 20 + 8, 30 + 8, as the middle one of three lengths is the longer of two."""
    found = lengths_by_call(judged(), LENGTHS, 4)
    assert found[0] is LENGTHS
    assert found[2].prompts.values == (14, 28, 38)
    assert found[2].responses.values == (4, 5)
    assert found[4].prompts.longest == 38 + 5
    assert found[4].responses.values == (4, 8)
    assert found[6] is found[4]


def test_of_given_samples_too():
    given = SampleLengths.given([GroupTokens(5, (2, 3)), GroupTokens(7, (1, 1))])
    assert given.answered(Lengths.fixed(3)) == SampleLengths(Lengths.recorded([7, 8, 8, 8]), Lengths.fixed(3))


def test_a_prompt_has_the_texts_that_its_function_is_given():
    """Two critiques of each first attempt, of 4 and 5 tokens: behind the shortest samples stand the shortest."""

    def flow(prompts, actor, ref):
        first = actor.generate(prompts)
        critiques = ref.generate(build_prompts(first, asks), samples_per_prompt=2, max_tokens=5)
        again = actor.generate(build_prompts(first, asks_again, critiques=critiques), samples_per_prompt=1)
        actor.train(again, loss=lambda batch: batch)

    found = lengths_by_call(trace(flow, roles=["actor", "ref"]), LENGTHS, 4)
    assert found[2].responses.values == (4, 5)
    assert found[4].prompts.values == (14 + 2 * 4, 28 + 2 * 5, 38 + 2 * 5)


def test_given_samples_are_read_with_what_was_said_of_them():
    given = SampleLengths.given([GroupTokens(5, (2, 9)), GroupTokens(7, (1,))])
    answered = given.answered(Lengths.fixed(3), [(Lengths.recorded([4, 5, 6]), 2), (Lengths.fixed(1), 1)])
    assert answered.prompts.values == (7 + 8 + 1, 8 + 10 + 1, 14 + 12 + 1)


def test_a_recorded_length_is_taken_as_it_is():
    told = SampleLengths(Lengths.fixed(50), Lengths.fixed(3))
    lengths = replace(LENGTHS, beside={"judge.generate": told})
    assert lengths_by_call(judged(), lengths, 4)[2] == told


def test_samples_of_a_step_are_counted():
    flow, workload = judged(), Workload(2, 4, LENGTHS)
    assert workload.samples_of(flow, flow.nodes[0]) == Samples(2, 4)
    assert workload.samples_of(flow, flow.nodes[2]) == Samples(8, 3)
    assert workload.samples_of(flow, flow.nodes[6]) == Samples(24, 1)
    recipe = Recipe.model_validate(
        {"model": "m", "data": {"source": "chain_sum"}, "prompts_per_step": 2, "samples_per_prompt": 4}
        | {"sampling": {"max_response_tokens": 8}}
    )
    batch = Arithmetic.of(recipe, flow, LENGTHS)
    assert batch.samples_per_step == 8 + 24 + 24
    assert batch.max_tokens_per_step == (2 * 30 + 8 * 8) + (8 * 38 + 24 * 5) + (24 * 43 + 24 * 8)


def test_a_judge_takes_as_long_as_a_rollout_of_such_prompts():
    """8 samples, each a prompt of 16 tokens, with three verdicts of 5 tokens: as 8 prompts of that length would take,
    and as much memory."""
    made = ModelCosts(WORK, {"actor": SHAPE, "judge": SHAPE}, judged(), a_cluster())
    lengths = SampleLengths(Lengths.fixed(16), Lengths.fixed(5))
    alone = ModelCosts(
        replace(WORK, prompts_per_step=8, lengths=lengths), {"actor": SHAPE, "judge": SHAPE}, plain(3), a_cluster()
    )
    for devices in (1, 2):
        layout = Layout.on(range(devices), dp=devices)
        found, expected = (costs.call("judge.generate", "decode", layout) for costs in (made, alone))
        assert found.terms == pytest.approx(expected.terms)
        assert found.working_bytes == expected.working_bytes


def test_a_simulated_step_draws_ahead_what_answers_its_prompts():
    graph = StepGraph.of(judged(), ["actor", "judge"], ahead=True)
    assert [graph.calls[number].call for number in sorted(graph.draws)] == [
        "actor.generate",
        "judge.generate",
        "actor.generate#2",
    ]
    assert [graph.calls[number].call for number in graph.draws_ahead] == ["actor.generate"]
    assert graph.calls[1].needs == {0}
    assert graph.calls[2].needs == {0, 1}
