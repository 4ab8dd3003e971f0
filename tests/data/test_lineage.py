"""Which samples of two calls belong together: two prompts with two samples each, three verdicts of each sample, further
attempts behind some of these."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plait.data.computing import evaluate, trained_rows
from plait.data.lineage import Meeting, made_of
from plait.data.records import MADE_UID, FinishReason, MadeOf, Prompt, Sample
from plait.data.rows import Rows
from plait.dataflow import Column, Level, Node, build_prompts, per_group, per_sample, trace
from plait.dataflow.graph import Dataflow
from plait.errors import RunError

SAMPLES, VERDICTS, AGAIN, OTHERS = 0, 2, 4, 5
"""Ids of the calls."""


def of(prompt: Prompt, count: int) -> list[Sample]:
    return [Sample(prompt, index, (7,), (-1.0,), f"{index}", FinishReason.STOP) for index in range(count)]


def prompts_of(samples: list[Sample], call: int, count: int) -> list[Prompt]:
    """A prompt made of each, in the order of the samples, as a run numbers them."""
    made = [made_of(sample, call) for sample in samples]
    return [Prompt(MADE_UID + place, "", (1,), made_of=each) for place, each in enumerate(made)]


FIRST = [sample for uid in (4, 9) for sample in of(Prompt(uid, "", (1,)), 2)]
SECOND = [sample for prompt in prompts_of(FIRST, SAMPLES, 2) for sample in of(prompt, 3)]
THIRD = [sample for prompt in prompts_of(SECOND, VERDICTS, 3)[::2] for sample in of(prompt, 1)]
OTHER = [sample for uid in (9, 4) for sample in of(Prompt(uid, "", (1,)), 1)]


def test_what_a_sample_is_called():
    assert [sample.uid for sample in FIRST] == ["4.0", "4.1", "9.0", "9.1"]
    assert SECOND[3].uid == "4.1.0"
    assert THIRD[1].uid == "4.0.2.0"
    assert SECOND[3].prompt.title() == "the prompt made of sample 4.1"
    assert SECOND[3].prompt.title(0) == "sample 4.1.0"
    assert THIRD[1].prompt.made_of == MadeOf(4, ((SAMPLES, 0), (VERDICTS, 2)))


def meets(own: list[Sample], call: int, others: list[Sample], other: int) -> list[list[str]]:
    """For each sample of the one call those of the other one that belong to it."""
    meeting = Meeting.of(own, call, others, other)
    places = meeting.places(others)
    return [[others[i].uid for i in places.get(meeting.key(sample), ())] for sample in own]


def test_samples_find_what_was_made_of_them():
    assert meets(FIRST, SAMPLES, SECOND, VERDICTS) == [
        ["4.0.0", "4.0.1", "4.0.2"],
        ["4.1.0", "4.1.1", "4.1.2"],
        ["9.0.0", "9.0.1", "9.0.2"],
        ["9.1.0", "9.1.1", "9.1.2"],
    ]
    assert meets(FIRST, SAMPLES, THIRD, AGAIN)[0] == ["4.0.0.0", "4.0.2.0"]
    assert meets(SECOND, VERDICTS, THIRD, AGAIN)[:3] == [["4.0.0.0"], [], ["4.0.2.0"]]


def test_what_is_made_finds_that_of_which_it_is():
    assert meets(SECOND, VERDICTS, FIRST, SAMPLES)[3:7] == [["4.1"], ["4.1"], ["4.1"], ["9.0"]]
    assert meets(THIRD, AGAIN, FIRST, SAMPLES)[:2] == [["4.0"], ["4.0"]]


def test_of_other_samples_the_prompt_is_in_common():
    assert meets(FIRST, SAMPLES, OTHER, OTHERS) == [["4.0"], ["4.0"], ["9.0"], ["9.0"]]
    assert meets(SECOND, VERDICTS, OTHER, OTHERS)[:1] == [["4.0"]]
    assert meets(FIRST, SAMPLES, [], OTHERS) == [[], [], [], []]


def two_calls_of_the_same_samples() -> list[list[str]]:
    """Two judges of the same samples have these in common."""
    return meets(SECOND, VERDICTS, [replace(sample, index=0) for sample in SECOND[::3]], OTHERS)


def test_two_judges_meet_by_sample():
    assert two_calls_of_the_same_samples()[:4] == [["4.0.0"], ["4.0.0"], ["4.0.0"], ["4.1.0"]]


def judged(fn, grain, count: int = 1) -> tuple[Dataflow, dict[int, Rows], Node]:
    """A function over a column of the samples and one of the verdicts, whose numbers are 0, 1, 2, …"""

    def flow(prompts, actor, judge, reward):
        samples = actor.generate(prompts)
        verdicts = judge.generate(build_prompts(samples, lambda prompts: prompts, name="asks"))
        own = per_sample(float, verdicts.finished, name="own")
        both = grain(fn, samples.finished, own, name="both")
        actor.train(samples, loss=lambda batch, both, own: both, both=both, own=own)

    traced = trace(flow, roles=["actor", "judge", "reward"])
    _, _, judge, own, both, _ = traced.nodes
    verdicts = [sample for sample in SECOND if sample.index < count]
    first = Rows(tuple(FIRST)).with_column(both.inputs["0"], np.zeros(len(FIRST)))
    second = Rows(tuple(verdicts)).with_column(own.outputs[0], np.arange(float(len(verdicts))))
    assert judge.id == VERDICTS
    return traced, {SAMPLES: first, VERDICTS: second}, both


def test_a_function_over_a_group_gets_what_was_said_of_its_samples():
    _, tables, node = judged(lambda _, own: own.reshape(-1, 3).sum(axis=1), per_group, count=3)
    assert evaluate(node, tables).tolist() == [0 + 1 + 2, 3 + 4 + 5, 6 + 7 + 8, 9 + 10 + 11]


def test_one_verdict_is_a_number_of_its_sample():
    flow, tables, node = judged(lambda _, own: 10 * own, per_sample)
    assert evaluate(node, tables).tolist() == [0, 10, 20, 30]
    tables[SAMPLES] = tables[SAMPLES].with_column(node.outputs[0], np.zeros(4))
    rows = trained_rows(flow.nodes[-1], tables)
    assert rows.columns[flow.nodes[-1].inputs["own"]].tolist() == [0, 1, 2, 3]


def test_samples_that_were_left_out_meanwhile_are_not_found():
    _, tables, node = judged(lambda _, own: own, per_group)
    tables[SAMPLES] = tables[SAMPLES].select([0, 2, 3])
    assert evaluate(node, tables).tolist() == [0, 2, 3]


def test_several_verdicts_are_no_number_of_a_sample():
    flow, tables, node = judged(lambda _, own: own, per_sample, count=3)
    message = r"reads own\[sample\] of other samples: expected exactly one of them for sample 4.0, found 3"
    with pytest.raises(RunError, match=message):
        evaluate(node, tables)
    tables[SAMPLES] = tables[SAMPLES].with_column(node.outputs[0], np.zeros(4))
    with pytest.raises(RunError, match=r"actor.train reads .* for sample 4.0, found 3"):
        trained_rows(flow.nodes[-1], tables)


def test_rows_of_them_are_ordered_by_what_they_are_made_of():
    """A column of a table under its own name: `Rows` checks shapes, whatever samples are made of."""
    column = Column("x", Level.TOKEN, 1, VERDICTS)
    rows = Rows(tuple(SECOND)).with_column(column, np.arange(12.0)).ordered()
    assert rows.columns[column].tolist() == list(range(12))
