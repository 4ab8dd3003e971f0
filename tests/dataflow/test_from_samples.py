"""Prompts that a function writes for samples: their place in the graph, who waits for them, and every mistake."""

from __future__ import annotations

from functools import partial

import pytest

from plait.dataflow import CallKind, Grain, Score, Top, build_prompts, per_batch, per_group, trace
from plait.dataflow.prompt_call import of_data, taken
from plait.errors import FlowError
from plait.schedule.needs import early_scores, may_stream, needs_of

ROLES = ["actor", "ref", "critic", "reward"]


def loss(batch, **columns):
    return batch


def hinted(prompts, completions, solution):
    return prompts


def by_score(prompts, scores, solution=None):
    return prompts


def taught(prompts, actor, ref, critic, reward):
    samples = actor.generate(prompts)
    scores = reward.score(samples)
    told = build_prompts(samples, by_score, name="told", scores=scores)
    shown = build_prompts(samples, hinted)
    top = actor.top_logprobs(samples, 4, prompts=told)
    actor.train(
        samples,
        loss=loss,
        ids=top.ids,
        of_ref=ref.logprobs(samples, prompts=shown),
        entropies=ref.entropies(samples, prompts=shown),
        values=critic.values(samples, prompts=told),
        own=ref.logprobs(samples),
    )


def test_the_graph_of_a_flow():
    graph = trace(taught, roles=ROLES)
    told, shown = graph.of_kind(CallKind.PROMPT)
    assert (told.call, shown.call) == ("told", "hinted")
    assert (told.grain, told.rows, told.role, told.outputs) == (Grain.GROUP, 0, None, ())
    assert {name: str(column) for name, column in told.inputs.items()} == {"scores": "reward_score[sample]"}
    assert {node.call: (node.prompts, node.rows) for node in graph.of_kind(CallKind.SCORE)} == {
        "reward.score": (None, 0),
        "actor.top_logprobs": (2, 0),
        "ref.logprobs": (3, 0),
        "ref.entropies": (3, 0),
        "critic.values": (2, 0),
        "ref.logprobs#2": (None, 0),
    }
    assert [node.scoring for node in graph.calls("ref")] == [Score.LOGPROBS, Score.ENTROPIES, Score.LOGPROBS]
    assert graph.calls("actor")[1].scoring == Top(4)
    assert str(graph).splitlines()[2:5] == [
        "2 told  per group  (scores=1) -> prompts",
        "3 hinted  per group  (0) -> prompts",
        "4 actor.top_logprobs  per sample  (prompts=2) -> actor_top_ids[token × 4], actor_top_logprobs[token × 5]",
    ]


def test_who_waits_for_them():
    """What is scored behind other prompts waits for these, and so for all samples; and, through them, for rewards."""
    graph = trace(taught, roles=ROLES)
    needs = needs_of(graph, ["reward"])
    ids = {node.call: node.id for node in graph.nodes}
    assert needs[ids["told"]] == {0, ids["reward.score"]}
    assert needs[ids["hinted"]] == {0, ids["reward.score"]}  # a sample without a reward is out of its group
    assert needs[ids["ref.logprobs"]] == {0, ids["hinted"]}
    assert needs[ids["ref.logprobs#2"]] == {0}
    assert early_scores(graph, needs, ["ref"]) == {ids["ref.logprobs#2"]}
    streaming = [node.call for node in graph.of_kind(CallKind.SCORE) if may_stream(node, graph)]
    assert streaming == ["reward.score", "ref.logprobs#2"]


def test_a_constant_is_no_column():
    def flow(prompts, actor, reward):
        samples = actor.generate(prompts)
        build_prompts(samples, partial(by_score, scores=1), scores=reward.score(samples))

    with pytest.raises(FlowError, match=r"takes no column `scores`; it takes: prompts, solution"):
        trace(flow, roles=ROLES)


def test_the_name_of_the_call_is_the_functions():
    def flow(prompts, actor):
        samples = actor.generate(prompts)
        told = [build_prompts(samples, fn) for fn in (hinted, partial(by_score, scores=None), lambda prompts: prompts)]
        again = build_prompts(samples, hinted)
        for prompts in (*told, again):
            actor.logprobs(samples, prompts=prompts)
        actor.train(samples, loss=loss)

    names = [node.call for node in trace(flow, roles=ROLES).of_kind(CallKind.PROMPT)]
    assert names == ["hinted", "by_score", "<lambda>", "hinted#2"]


def test_a_function_gets_what_it_asks_for():
    given = {"prompts": ["a"], "completions": ["b"], "solution": ["c"]}
    assert taken(hinted, given) == given
    assert taken(by_score, given) == {"prompts": ["a"], "solution": ["c"]}
    assert taken(lambda prompts, **columns: prompts, given) == given
    assert taken(partial(hinted, solution="5"), given) == {"prompts": ["a"], "completions": ["b"]}
    assert of_data(hinted, ()) == ("solution",)
    assert of_data(partial(hinted, solution="5"), ()) == ()
    assert of_data(by_score, ["scores"]) == ()
    assert of_data(lambda prompts, **columns: prompts, ()) == ()


# -- mistakes


def of_prompts(prompts, actor):
    build_prompts(prompts, hinted)


def with_no_function(prompts, actor):
    build_prompts(actor.generate(prompts), "hinted")


async def awaited(prompts):
    return prompts


def with_a_coroutine(prompts, actor):
    build_prompts(actor.generate(prompts), awaited)


def with_an_unknown_column(prompts, actor, reward):
    samples = actor.generate(prompts)
    build_prompts(samples, by_score, score=reward.score(samples))


def with_a_number(prompts, actor):
    build_prompts(actor.generate(prompts), by_score, scores=1.0)


def with_a_name_of_samples(prompts, actor, reward):
    samples = actor.generate(prompts)
    build_prompts(samples, lambda **columns: [], completions=reward.score(samples))


def positional(prompts, /):
    return prompts


def by_position(prompts, actor):
    build_prompts(actor.generate(prompts), positional)


def with_a_misfit(prompts, actor):
    build_prompts(actor.generate(prompts), partial(hinted, solutions="5"))


def with_no_name(prompts, actor):
    build_prompts(actor.generate(prompts), hinted, name="")


def with_tokens_of_others(prompts, actor):
    samples, others = actor.generate(prompts), actor.generate(prompts)
    build_prompts(samples, by_score, scores=actor.logprobs(others))


def behind_those_of_the_step(prompts, actor):
    actor.logprobs(actor.generate(prompts), prompts=prompts)


def behind_samples(prompts, actor):
    samples = actor.generate(prompts)
    actor.logprobs(samples, prompts=samples)


def behind_those_of_others(prompts, actor):
    samples, others = actor.generate(prompts), actor.generate(prompts)
    actor.logprobs(samples, prompts=build_prompts(others, hinted))


def scores_behind_them(prompts, actor, reward):
    samples = actor.generate(prompts)
    reward.score(samples, prompts=build_prompts(samples, hinted))


def computed_with(prompts, actor):
    per_group(max, build_prompts(actor.generate(prompts), hinted), name="x")


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        (of_prompts, r"build_prompts\(hinted\) takes samples \(what `generate` returns\), not prompts"),
        (with_no_function, r"build_prompts\(a str\) takes a function behind the samples, not a str"),
        (with_a_coroutine, r"build_prompts\(awaited\): expected a plain function, found one with `async` or `yield`"),
        (with_an_unknown_column, r"takes no column `score` \(did you mean `scores`\?\); it takes: prompts, scores, s"),
        (with_a_number, r"build_prompts\(by_score\)\(scores=…\) takes a column .*, not a float"),
        (with_a_name_of_samples, "the function gets something else as `completions`; give the column another name"),
        (by_position, "the function takes `prompts` by position only, but arguments are given by name"),
        (with_a_misfit, r"its `partial` does not fit: .* 'solutions' \(did you mean `solution`\?\)"),
        (with_no_name, "expected a name of printable characters, found ''"),
        (with_tokens_of_others, r"actor_logprobs\[token\] belongs to other samples"),
        (behind_those_of_the_step, r"prompts=…\) takes what `build_prompts` returns .*, not those of the step"),
        (behind_samples, r"actor.logprobs\(prompts=…\) takes what `build_prompts` returns .*, not samples"),
        (behind_those_of_others, "the prompts were written for other samples than those of the call"),
        (scores_behind_them, r"unexpected keyword argument 'prompts'"),
        (computed_with, r"per_group\(max\) takes columns, not prompts"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_mistake_is_named(flow, message):
    with pytest.raises(FlowError, match=message):
        trace(flow, roles=ROLES)


def test_a_number_of_the_whole_batch_may_be_read():
    def flow(prompts, actor, reward):
        samples = actor.generate(prompts)
        mean = per_batch(lambda scores: scores.mean(), reward.score(samples), name="mean", level="batch")
        build_prompts(samples, by_score, scores=mean)
        actor.train(samples, loss=loss)

    assert [node.kind for node in trace(flow, roles=ROLES).nodes][3] is CallKind.PROMPT


@pytest.mark.parametrize(("was", "now"), [("prompts_from", "build_prompts"), ("grades_from", "parse_grades")])
def test_a_flow_with_a_name_of_an_earlier_version_is_told_todays(was: str, now: str) -> None:
    with pytest.raises(ImportError, match=f"^`{was}` of plait.dataflow is `{now}` now$"):
        exec(f"from plait.dataflow import {was}", {})
