"""Which samples the calls of a step have computed: by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.data.records import Reply, Sample
from plait.data.rows import Rows
from plait.dataflow import CallKind, Level, Node, per_sample, trace
from plait.runtime.steps.step import StepState
from plait.runtime.utilisation import counted, scored_rows, trained
from tests.runtime.samples import sample, whole_batch


def masked(prompts: Any, actor: Any, reward: Any) -> None:
    samples = actor.generate(prompts)
    scores = reward.score(samples)
    mask = per_sample(lambda score: score, scores, name="trained", level=Level.TOKEN)
    keep = per_sample(lambda score: score, scores, name="kept")
    actor.train(samples, loss=lambda batch: batch, mask=mask, keep=keep, mini_batches=3, epochs=2)


FLOW = trace(masked, roles=("actor", "reward"))
DRAWS, SCORES, TRAINS = (FLOW.of_kind(kind)[0] for kind in (CallKind.GENERATE, CallKind.SCORE, CallKind.TRAIN))


def batch(node: Node, trained_of: list[float], kept: list[float]) -> StepState:
    """Three prompts of two samples with two tokens each."""
    state = whole_batch(0, node.id, 1, 2, 3)
    assert TRAINS.mask is not None
    assert TRAINS.keep is not None
    state.add(TRAINS.mask, np.array(trained_of))
    state.add(TRAINS.keep, np.array(kept))
    return state


def test_mini_batches_without_a_trained_token_are_not_computed() -> None:
    """Prompt 2's samples have none, and are a mini-batch of their own: two of three are left, twice."""
    state = batch(DRAWS, [1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1], [1] * 6)
    samples, batches = trained(TRAINS, state, seed=3)
    assert len(samples.group) == 6
    assert sorted(batches) == [(0, 1), (0, 1), (4, 5), (4, 5)]


def test_samples_that_are_kept_out_are_not_computed() -> None:
    """Of two groups one sample is left, of the third both."""
    state = batch(DRAWS, [1] * 12, [1, 0, 0, 1, 1, 1])
    samples, batches = trained(TRAINS, state, seed=3)
    assert samples.group.tolist() == [1, 2, 3, 3]
    assert sorted(batches) == [(0,), (0,), (1,), (1,), (2, 3), (2, 3)]


def test_a_model_has_scored_what_was_left_out_since() -> None:
    """Prompt 1 has lost a sample, and the groups of prompts 4 and 5 were drawn and refused; no model was asked for
    prompt 5."""
    state = whole_batch(0, DRAWS.id, 1, 2)
    state.generated[DRAWS.id] = Rows(tuple(sample(uid, index) for uid in (1, 2, 4, 5) for index in range(2)))
    state.tables[DRAWS.id] = state.tables[DRAWS.id].select([0, 2, 3])
    assert len(scored_rows(SCORES, state)) == 4
    state.model_scores[SCORES.id] = {sample(uid, index).uid: 0.0 for uid in (1, 2, 4) for index in range(2)}
    assert [one.prompt.uid for one in scored_rows(SCORES, state).samples] == [1, 1, 2, 2, 4, 4]


def test_what_passes_the_layers_and_what_the_head() -> None:
    """A sample of three tokens and a reply of four between them; one that says nothing is computed as far as its
    prompt."""
    talk = Sample(**{**vars(sample(1, 0, (4, 5, 6))), "replies": (Reply(2, (7, 8, 9, 7)),)})
    silent = sample(1, 1, ())
    read, drawn = counted([talk, silent]), counted([talk, silent], is_drawn=True)
    assert (read.said.tolist(), read.headed.tolist()) == ([7, 0], [3, 0])
    assert (drawn.said.tolist(), drawn.headed.tolist()) == ([6, 0], [3, 0])
    assert counted([talk, silent], each=False).headed.tolist() == [1, 1]
