"""Tracing: the graph of small flows, and the message of every mistake that a flow can hold."""

from __future__ import annotations

from functools import partial

import pytest

from plait.dataflow import (
    CallKind,
    Dataflow,
    GenerateOptions,
    Grain,
    Level,
    Score,
    Top,
    TrainOptions,
    per_batch,
    per_group,
    per_sample,
    trace,
)
from plait.dataflow.graph import scores_alone, scores_by_turn, scores_decoupled
from plait.errors import FlowError

ROLES = ["actor", "ref", "reward"]


def loss(batch, advantages, ref_logprobs=None):
    return batch


def centre(rewards):
    return rewards


def flow_of(body) -> Dataflow:
    """Trace a flow that generates and scores, hands both to `body`, and trains on what it gives."""

    def flow(prompts, actor, reward):
        samples = actor.generate(prompts)
        actor.train(samples, loss=loss, advantages=body(samples, reward.score(samples)))

    return trace(flow, roles=ROLES)


def test_a_flow_may_ask_what_a_handle_has():
    """As one does that takes generated and given samples alike."""

    def flow(pairs, actor, reward):
        assert getattr(pairs, "logprobs", None) is None
        assert hasattr(pairs, "margin")
        assert not hasattr(pairs.margin, "mean")
        assert not hasattr(pairs, "label")
        actor.train(pairs, loss=loss, advantages=reward.score(pairs))

    assert trace(flow, roles=ROLES).name == "flow"


def test_the_graph_of_a_flow():
    def flow(prompts, actor, ref, reward, options):
        samples = actor.generate(prompts, samples_per_prompt=options)
        advantages = per_group(centre, reward.score(samples), name="advantages")
        actor.train(
            samples,
            loss=loss,
            mini_batches=2,
            epochs=3,
            advantages=advantages,
            ref_logprobs=ref.logprobs(samples),
        )

    graph = trace(flow, roles=ROLES, options=4)
    assert graph.name == "flow"
    assert graph.roles == ("actor", "reward", "ref")
    assert [(n.call, n.kind, n.grain) for n in graph.nodes] == [
        ("actor.generate", CallKind.GENERATE, Grain.SAMPLE),
        ("reward.score", CallKind.SCORE, Grain.SAMPLE),
        ("advantages", CallKind.COMPUTE, Grain.GROUP),
        ("ref.logprobs", CallKind.SCORE, Grain.SAMPLE),
        ("actor.train", CallKind.TRAIN, Grain.BATCH),
    ]
    generate, score, advantages, logprobs, train = graph.nodes
    assert generate.generation == GenerateOptions(samples_per_prompt=4)
    assert [str(node.outputs[0]) for node in graph.nodes[:4]] == [
        "sampling_logprobs[token]",
        "reward_score[sample]",
        "advantages[sample]",
        "ref_logprobs[token]",
    ]
    assert advantages.inputs == {"0": score.outputs[0]}
    assert train.inputs == {"advantages": advantages.outputs[0], "ref_logprobs": logprobs.outputs[0]}
    assert train.training == TrainOptions(mini_batches=2, epochs=3)
    assert (score.scoring, logprobs.scoring) == (Score.SCORE, Score.LOGPROBS)
    assert train.fn is loss
    assert scores_alone(score) == {}
    assert all(node.rows == generate.id for node in graph.nodes)
    assert [node.call for node in graph.calls("actor")] == ["actor.generate", "actor.train"]
    assert str(graph) == (
        "0 actor.generate  per sample  (0) -> sampling_logprobs[token], finished[sample], tokens_left[sample]\n"
        "1 reward.score  per sample  (0) -> reward_score[sample]\n"
        "2 advantages  per group  (0=1) -> advantages[sample]\n"
        "3 ref.logprobs  per sample  (0) -> ref_logprobs[token]\n"
        "4 actor.train  per batch  (advantages=2, ref_logprobs=3) -> weights"
    )


def test_call_names_are_unique():
    def flow(prompts, actor, reward):
        first, second = actor.generate(prompts), actor.generate(prompts, greedy=True)
        actor.train(first, loss=loss, advantages=reward.score(first))
        actor.train(second, loss=loss, advantages=reward.score(second))
        actor.train(second, loss=loss, advantages=reward.score(second))

    assert [node.call for node in trace(flow, roles=ROLES).nodes] == [
        "actor.generate",
        "actor.generate#2",
        "reward.score",
        "actor.train",
        "reward.score#2",
        "actor.train#2",
        "reward.score#3",
        "actor.train#3",
    ]


def test_a_sample_column_of_other_samples_may_be_read():
    def flow(prompts, actor, reward):
        samples, greedy = actor.generate(prompts), actor.generate(prompts, greedy=True, samples_per_prompt=1)
        score, baseline = reward.score(samples), reward.score(greedy)
        advantages = per_sample(lambda a, b: a - b, score, baseline, name="advantages")
        actor.train(samples, loss=loss, advantages=advantages)

    node = trace(flow, roles=ROLES).nodes[4]
    assert node.rows == 0
    assert [column.rows for column in node.inputs.values()] == [0, 1]


def test_a_token_column_of_other_samples_may_not():
    def flow(prompts, actor):
        samples, greedy = actor.generate(prompts), actor.generate(prompts, greedy=True)
        actor.train(samples, loss=loss, advantages=greedy.logprobs)

    with pytest.raises(FlowError, match=r"actor\.train\(advantages=…\): sampling_logprobs\[token\] belongs to other"):
        trace(flow, roles=ROLES)


def test_an_optional_role_that_nothing_fills_keeps_its_default():
    seen = []

    def flow(prompts, actor, critic=None):
        seen.append(critic)
        actor.train(actor.generate(prompts), loss=lambda batch: batch)

    trace(flow, roles=ROLES)
    assert seen == [None]


def test_a_column_of_none_is_left_out():
    def flow(prompts, actor, reward):
        samples = actor.generate(prompts)
        actor.train(samples, loss=loss, advantages=reward.score(samples), ref_logprobs=None)

    assert set(trace(flow, roles=ROLES).nodes[-1].inputs) == {"advantages"}


def test_a_loss_may_take_any_columns_and_constants():
    def open_loss(batch, *extra, **columns):
        return batch

    def weighted(batch, advantages, *, weight):
        return batch

    def flow(prompts, actor, reward):
        samples = actor.generate(prompts)
        score = reward.score(samples)
        actor.train(samples, loss=open_loss, anything=score)
        actor.train(samples, loss=partial(weighted, weight=2), advantages=score)

    assert [set(node.inputs) for node in trace(flow, roles=ROLES).calls("actor")[1:]] == [{"anything"}, {"advantages"}]


@pytest.mark.parametrize("grain", [per_sample, per_group, per_batch])
def test_constants_and_levels_of_a_computation(grain):
    graph = flow_of(lambda s, r: grain(lambda a, b, k: a, r, s.logprobs, name="x", level=Level.TOKEN, k=3))
    node = graph.nodes[2]
    assert node.grain == grain.__name__.removeprefix("per_")
    assert node.computing.constants == {"k": 3}
    assert str(node.outputs[0]) == "x[token]"


def test_a_function_that_does_not_say_what_it_takes_may_be_called():
    """As some built-in ones of Python and, before NumPy 2.4, those of NumPy."""
    assert flow_of(lambda s, r: per_sample(max, r, s.finished, name="x")).nodes[2].fn is max


def call_missing_role(prompts, actor, rewrd):
    pass


def call_unknown_call(prompts, actor):
    actor.logprob(actor.generate(prompts))


def generate_from_samples(prompts, actor):
    actor.generate(actor.generate(prompts))


def score_prompts(prompts, reward):
    reward.score(prompts)


def train_without_a_column(prompts, actor):
    actor.train(actor.generate(prompts), loss=loss)


def train_with_an_unknown_column(prompts, actor, reward):
    samples = actor.generate(prompts)
    actor.train(samples, loss=loss, advantage=reward.score(samples))


def train_with_an_unknown_argument(prompts, actor, reward):
    samples = actor.generate(prompts)
    actor.train(samples, loss=partial(loss, scal=1.0), advantages=reward.score(samples))


def compute_with_an_unknown_argument(prompts, actor, reward):
    per_group(partial(scaled, scal=2.0), reward.score(actor.generate(prompts)), name="advantages")


def scaled(scores, scale=1.0): ...


def train_with_a_number(prompts, actor):
    actor.train(actor.generate(prompts), loss=loss, advantages=1.0)


def train_with_no_batch(prompts, actor, reward):
    samples = actor.generate(prompts)
    actor.train(samples, loss=lambda rows, advantages: rows, advantages=reward.score(samples))


def train_zero_epochs(prompts, actor):
    actor.train(actor.generate(prompts), loss=lambda batch: batch, epochs=0)


def train_half_a_mini_batch(prompts, actor):
    actor.train(actor.generate(prompts), loss=lambda batch: batch, mini_batches=0.5)


def train_with_a_flag_in_words(prompts, actor):
    actor.train(actor.generate(prompts), loss=lambda batch: batch, whole_groups="no")


def train_before_the_beginning(prompts, actor):
    actor.train(actor.generate(prompts), loss=lambda batch: batch, after=-1)


def generate_no_samples(prompts, actor):
    actor.generate(prompts, samples_per_prompt=0)


def generate_greedily_by_number(prompts, actor):
    actor.generate(prompts, greedy=1)


def train_nothing(prompts, actor):
    actor.generate(prompts)


def compute_without_columns(prompts, actor):
    per_sample(centre, name="x")


def compute_on_samples(prompts, actor):
    per_sample(centre, actor.generate(prompts), name="x")


def compute_with_too_many_columns(prompts, actor, reward):
    samples = actor.generate(prompts)
    per_group(centre, reward.score(samples), samples.logprobs, name="x")


def compute_with_an_unknown_constant(prompts, actor, reward):
    per_group(centre, reward.score(actor.generate(prompts)), name="x", scale=True)


def ask_a_column(prompts, actor, reward):
    if reward.score(actor.generate(prompts)):
        pass


def compare_a_column(prompts, actor, reward):
    if reward.score(actor.generate(prompts)) == 0:
        pass


def average_a_column(prompts, actor, reward):
    samples = actor.generate(prompts)
    actor.train(samples, loss=loss, advantages=reward.score(samples).mean())


def read_an_unknown_column(prompts, actor, reward):
    samples = actor.generate(prompts)
    actor.train(samples, loss=loss, advantages=samples.logprob)


def read_an_unknown_column_of_labels(labelled, actor):
    actor.train(labelled, loss=loss, advantages=labelled.mismatched.label)


def calculate_with_a_column(prompts, actor, reward):
    1 - 0.1 * reward.score(actor.generate(prompts))


def ask_for_no_tokens(prompts, ref):
    ref.top_logprobs(actor_samples(prompts, ref), 0)


def ask_for_tokens_in_words(prompts, ref):
    ref.top_logprobs(actor_samples(prompts, ref), "64")


def train_with_tokens_alone(prompts, actor):
    samples = actor.generate(prompts)
    actor.train(samples, loss=loss, advantages=actor.top_logprobs(samples, 4))


def train_where_tokens_are(prompts, actor):
    samples = actor.generate(prompts)
    actor.train(samples, loss=lambda batch: batch, mask=actor.top_logprobs(samples, 4).ids)


def summed(*, between=None, first=None, second=None):
    """A flow of two calls whose gradients meet; `second=None`: it is not there."""

    def flow(prompts, examples, actor, ref, reward):
        samples = actor.generate(prompts)
        actor.train(samples, loss=lambda batch: batch, with_next=True, **(first or {}))
        if between is not None:
            between(samples, actor, ref)
        if second is not None:
            actor.train(examples, loss=lambda batch: batch, **second)

    return flow


def generate_several_greedily(prompts, actor):
    actor.train(actor.generate(prompts, greedy=True, samples_per_prompt=3), loss=lambda batch: batch)


def misspells_prompts(promps, actor):
    actor.train(actor.generate(promps), loss=lambda batch: batch)


def actor_samples(prompts, role):
    return role.generate(prompts)


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        (
            call_missing_role,
            r"the role `rewrd`, which nothing fills \(did you mean `reward`\?\); filled roles: actor, ref",
        ),
        (
            misspells_prompts,
            r"`promps`, which nothing fills \(did you mean `prompts`\?\); .*; data: prompts, examples, pairs, labelled",
        ),
        (call_unknown_call, r"role `actor` has no call `logprob` \(did you mean `logprobs`\?\); its calls: generate"),
        (
            generate_from_samples,
            "actor.generate takes the flow's `prompts`, or what `build_prompts` returns, not samples",
        ),
        (score_prompts, r"reward.score takes samples \(what `generate` returns\), not prompts"),
        (train_without_a_column, "actor.train: the loss `loss` needs the column `advantages`, which is not given"),
        (train_with_an_unknown_column, r"takes no column `advantage` \(did you mean `advantages`\?\); it takes: adv"),
        (
            train_with_an_unknown_argument,
            "actor.train: the loss `loss`: its `partial` does not fit: got an unexpected keyword argument 'scal'$",
        ),
        (
            compute_with_an_unknown_argument,
            r"per_group\(scaled\) .*: its `partial` does not fit: .* 'scal' \(did you mean `scale`\?\)",
        ),
        (train_with_a_number, r"actor.train\(advantages=…\) takes a column \(what a call returns\), not a float"),
        (train_with_no_batch, "actor.train: the first parameter of the loss `<lambda>` must be `batch`"),
        (train_zero_epochs, "actor.train: epochs must be at least 1, found 0"),
        (train_half_a_mini_batch, "actor.train: mini_batches must be a whole number, found 0.5"),
        (train_with_a_flag_in_words, "actor.train: whole_groups must be True or False, found 'no'"),
        (train_before_the_beginning, "actor.train: after must be at least 0, found -1"),
        (generate_no_samples, "actor.generate: samples_per_prompt must be at least 1, found 0"),
        (generate_greedily_by_number, "actor.generate: greedy must be True or False, found 1"),
        (generate_several_greedily, r"`samples_per_prompt=3` would give equal samples; leave one of them out"),
        (train_nothing, "flow `train_nothing` trains nothing"),
        (compute_without_columns, r"per_sample\(centre\) needs at least one column"),
        (compute_on_samples, r"per_sample\(centre\) takes columns, not samples"),
        (compute_with_too_many_columns, r"per_group\(centre\) cannot be called with 2 columns and \[\]: too many"),
        (compute_with_an_unknown_constant, r"cannot be called with 1 columns and \['scale'\]: got an unexpected"),
        (ask_a_column, r"asks whether reward_score\[sample\] is true, but a flow runs once on symbolic handles"),
        (compare_a_column, r"computes with reward_score\[sample\], which has no values .* per_sample"),
        (average_a_column, r"computes with reward_score\[sample\], which has no values .* per_sample"),
        (
            read_an_unknown_column,
            r"no column `logprob` \(did you mean `logprobs`\?\); theirs: logprobs, finished, tokens_left, turn; others",
        ),
        (read_an_unknown_column_of_labels, r"no column `label`; theirs: trained, margin; others"),
        (ask_for_no_tokens, "ref.top_logprobs: k must be at least 1, found 0"),
        (ask_for_tokens_in_words, "ref.top_logprobs: k must be a whole number, found '64'"),
        (train_with_tokens_alone, r"not what `top_logprobs` returns \(give its `ids` and its `logprobs`\)"),
        (train_where_tokens_are, r"mask=…\) takes one number per token, not actor_top_ids\[token × 4\]"),
        (summed(), r"flow `flow`: actor.train\(with_next=True\) .*, expected another actor.train, found none; make"),
        (
            summed(second={"with_next": True}),
            r"actor.train#2\(with_next=True\) .* another actor.train, found none",
        ),
        (
            summed(between=lambda samples, actor, ref: ref.logprobs(samples), second={}),
            r"actor.train\(with_next=True\) .* expected another actor.train, found ref.logprobs; make all other",
        ),
        (
            summed(between=lambda samples, actor, ref: ref.train(samples, loss=lambda batch: batch), second={}),
            "expected another actor.train, found ref.train",
        ),
        (
            summed(first={"mini_batches": 4}, second={"epochs": 2}),
            r"its optimizer steps with actor.train#2, expected equal `mini_batches x epochs` of both, found 4 and 2",
        ),
        (summed(first={"after": 1}, second={}), "expected equal `after` of both, found 1 and 0"),
        (summed(first={"mini_batches": "4"}, second={}), "actor.train: mini_batches must be a whole number, found '4'"),
        (summed(second={"with_next": "no"}), "actor.train: with_next must be True or False, found 'no'"),
        (calculate_with_a_column, r"computes with reward_score\[sample\], which has no values .* per_sample"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_mistake_is_named(flow, message):
    with pytest.raises(FlowError, match=message):
        trace(flow, roles=ROLES)


def test_gradients_of_several_calls_meet_in_one_step():
    """Functions over columns may stand between; a third loss may be among them; the steps are those of the last."""

    def flow(prompts, examples, actor, reward):
        samples = actor.generate(prompts)
        scores = reward.score(samples)
        how = {"mini_batches": 2, "epochs": 2, "after": 1}
        actor.train(samples, loss=lambda batch: batch, with_next=True, **how)
        advantages = per_group(centre, scores, name="advantages")
        actor.train(samples, loss=loss, advantages=advantages, with_next=True, **how)
        actor.train(examples, loss=lambda batch: batch, mini_batches=4, after=1)
        actor.train(samples, loss=lambda batch: batch)

    graph = trace(flow, roles=ROLES)
    meeting = [[node.call for node in update] for update in graph.updates("actor")]
    assert meeting == [["actor.train", "actor.train#2", "actor.train#3"], ["actor.train#4"]]
    assert graph.optimizer_steps("actor", 3) == 2 * 4 + 3
    assert [str(line).rpartition(" ")[2] for line in str(graph).splitlines() if "train" in line.split()[1]] == [
        "gradients",
        "gradients",
        "weights",
        "weights",
    ]


def test_a_call_has_the_options_of_its_kind_alone():
    graph = flow_of(lambda samples, rewards: rewards)
    generate, score, train = graph.nodes
    assert [generate.asks, score.asks, train.asks] == ["generate", "score", "train"]
    assert generate.generation.num_samples(samples_per_prompt=8) == 8
    assert GenerateOptions(samples_per_prompt=2).num_samples(samples_per_prompt=8) == 2
    with pytest.raises(AssertionError, match=r"actor\.generate is no TRAIN node"):
        _ = generate.training
    with pytest.raises(AssertionError, match=r"actor\.train is no GENERATE node"):
        _ = train.generation


def test_the_scores_of_one_function_are_a_column_of_the_same_call():
    def flow(prompts, actor, reward):
        samples = actor.generate(prompts)
        scores = reward.score(samples)
        with pytest.raises(FlowError, match=r"reward_score\[sample\].of takes the name of a reward function, not None"):
            scores.of(None)
        twice = [per_group(centre, scores.of("brief"), name=name) for name in ("one", "other")]
        actor.train(samples, loss=loss, advantages=twice[0], ref_logprobs=twice[1])

    graph = trace(flow, roles=ROLES)
    score, one, other = graph.nodes[1:4]
    assert [str(column) for column in score.outputs] == ["reward_score[sample]", "reward_score/brief[sample]"]
    assert scores_alone(score) == {"brief": score.outputs[1]}
    assert one.inputs == other.inputs == {"0": score.outputs[1]}


def test_what_is_said_of_turns_is_a_column_of_the_call_that_says_it():
    def flow(prompts, actor, reward):
        samples = actor.generate(prompts)
        scores = reward.score(samples)
        twice = [per_sample(max, scores.by_turn, samples.turn, name=name, level=Level.TOKEN) for name in ("a", "b")]
        assert scores.of("by_turn").column != scores.by_turn.column
        assert scores.decoupled.column == scores.decoupled.column != scores.of("decoupled").column
        actor.train(samples, loss=loss, advantages=twice[0], ref_logprobs=twice[1])

    generate, score, one, other = trace(flow, roles=ROLES).nodes[:4]
    assert [str(column) for column in generate.outputs[3:]] == ["turn[token]"]
    assert [str(column) for column in score.outputs[1:]] == [
        "reward_score_by_turn[token]",
        "reward_score/by_turn[sample]",
        "reward_score_decoupled[sample]",
        "reward_score/decoupled[sample]",
    ]
    assert scores_by_turn(score) == score.outputs[1]
    assert scores_alone(score) == {"by_turn": score.outputs[2], "decoupled": score.outputs[4]}
    assert scores_decoupled(score) == score.outputs[3]
    assert one.inputs == other.inputs == {"0": score.outputs[1], "1": generate.outputs[3]}
    plain = flow_of(lambda samples, scores: scores).nodes[1]
    assert scores_by_turn(plain) is scores_decoupled(plain) is None


def test_the_likeliest_tokens_are_two_columns_of_one_call():
    def flow(prompts, actor, ref):
        samples = actor.generate(prompts)
        top, again = ref.top_logprobs(samples, 4), ref.top_logprobs(samples, 8)
        actor.train(samples, loss=loss, advantages=top.ids, ref_logprobs=top.logprobs)
        actor.train(samples, loss=loss, advantages=again.ids)

    _, score, again, train, _ = trace(flow, roles=ROLES).nodes
    assert (score.call, score.asks, score.scoring) == ("ref.top_logprobs", "top_logprobs", Top(4))
    assert [str(column) for column in score.outputs] == ["ref_top_ids[token × 4]", "ref_top_logprobs[token × 5]"]
    assert [column.numbers for column in score.outputs] == [4, 5]
    assert train.inputs == {"advantages": score.outputs[0], "ref_logprobs": score.outputs[1]}
    assert (again.call, again.scoring) == ("ref.top_logprobs#2", Top(8))
    assert scores_by_turn(score) is None
    assert scores_alone(score) == {}
