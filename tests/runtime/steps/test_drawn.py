"""Batches that no step has trained on: what of them a checkpoint keeps, and that it is read back as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.checkpoint.store import CheckpointStore
from plait.data.experts import Experts
from plait.data.records import FinishReason, Prompt, Reply, Sample
from plait.data.rows import Rows
from plait.errors import RunError
from plait.runtime.steps.drawn import DrawnBatch, read_drawn, stored_drawn
from plait.runtime.steps.partial_rollout import PartialRollout
from tests.runtime.samples import halted_batch, prompt, sample, whole_batch

NODE = 3


def test_a_batch_keeps_all_that_was_drawn_and_which_groups_are_trained_on() -> None:
    state = whole_batch(5, NODE, 7, 8)
    kept = state.generated[NODE].select([2, 3])
    state.begin_table(NODE, kept)
    state.metrics, state.said_by = {"reward": 0.5, "drawn": 4.0}, {"drawn": NODE}
    state.model_scores[6] = {"8.0": 1.5}
    batch = DrawnBatch.of(state)
    assert (batch.step, batch.drawn, batch.prompts) == (5, 7, (7, 8))
    assert [one.uid for one in batch.samples[NODE]] == ["7.0", "7.1", "8.0", "8.1"]
    assert batch.kept == {NODE: (8,)}
    assert batch.said == (("reward", 0.5, -1), ("drawn", 4.0, NODE))
    assert batch.model_scores == {6: {"8.0": 1.5}}


def test_what_later_calls_add_is_not_in_it() -> None:
    state = whole_batch(5, NODE, 7)
    state.model_scores[6] = {"7.0": 1.5}
    batch = DrawnBatch.of(state)
    state.model_scores[6]["7.1"] = 2.5
    state.count("late", 1)
    assert (batch.model_scores, batch.said) == ({6: {"7.0": 1.5}}, ())


def test_of_a_rollout_that_was_halted_it_has_what_ended_then_what_had_begun() -> None:
    batch = DrawnBatch.of(halted_batch(4, NODE))
    assert [(one.uid, one.finish_reason) for one in batch.samples[NODE]] == [
        ("8.1", FinishReason.STOP),
        ("9.0", FinishReason.OPEN),
    ]
    assert batch.kept == {NODE: None}


def test_a_rollout_that_has_drawn_again_keeps_the_prompts_of_which_nothing_is_said() -> None:
    state = halted_batch(4, NODE)
    state.growing[NODE].extend([prompt(11), prompt(12)])
    state.growing[NODE].extend([prompt(13)])
    batch = DrawnBatch.of(state)
    assert (batch.prompts, batch.further) == ((8, 9), {NODE: ((prompt(11), prompt(12)), (prompt(13),))})
    assert DrawnBatch.of(halted_batch(4, NODE)).further == {}


def test_the_tensors_of_a_checkpoint_are_flat() -> None:
    tensors, stated = DrawnBatch.of(halted_batch(4, NODE)).stored()
    assert {name: (tensor.tolist(), tensor.dtype) for name, tensor in tensors.items()} == {
        "batch-4.3.token_ids": ([4, 5, 6, 7, 8], torch.int64),
        "batch-4.3.logprobs": ([-4 / 3, -5 / 3, -6 / 3, -7 / 3, -8 / 3], torch.float64),
        "batch-4.3.versions": ([2] * 5, torch.int64),
    }
    assert stated["rollouts"]["3"] == {
        "kept": None,
        "samples": [[8, 3, 1, 2, "stop", 2, False, "text"], [9, 1, 0, 3, "open", 2, False, "text"]],
        "turns": {},
        "reply_errors": {},
    }


samples = st.builds(
    lambda uid, index, tokens, reason, versions, replies, error: replace(
        sample(uid, index, [token for token, _ in tokens], reason),
        logprobs=tuple(logprob for _, logprob in tokens),
        token_versions=tuple(versions[: len(tokens)]) if versions is not None and len(tokens) > 0 else None,
        replies=tuple(Reply(at, tuple(ids)) for at, ids in replies.items()),
        turns=tuple({"role": "tool", "content": str(at)} for at in replies),
        reply_error=error,
    ),
    st.integers(0, 5),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 2**31), st.floats(-100, 0)), max_size=6),
    st.sampled_from(FinishReason),
    st.none() | st.lists(st.integers(0, 9), min_size=6, max_size=6),
    st.dictionaries(st.integers(1, 6), st.lists(st.integers(0, 2**31), max_size=3), max_size=2),
    st.sampled_from(["", "raised KeyError: 1"]),
)


@given(drawn=st.lists(samples, max_size=5, unique_by=lambda one: one.uid))
def test_it_is_read_back_as_it_was(drawn: list[Sample]) -> None:
    said, scores = (("a", 0.1, 3),), {6: {"0.1": -0.1}}
    further = {3: ((prompt(7), prompt(2)), (prompt(9),))}
    kept = tuple(replace(s, supports=tuple(b"\0" * (t % 3) for t in s.token_ids)) for s in drawn)
    routed = tuple(
        replace(s, experts=Experts(b"\1" * s.prompt.uid, bytes(t % 256 for t in s.token_ids))) for s in drawn[1:]
    )
    for both in (tuple(drawn), kept, (*drawn[:1], *routed)):
        batch = DrawnBatch(2, 11, (0, 5), {3: both, 4: ()}, {3: None, 4: (0,)}, said, scores, further)
        tensors, stated = batch.stored()
        assert DrawnBatch.read(tensors, stated, prompt) == batch


def test_a_prompt_of_other_tokens_is_refused() -> None:
    tensors, stated = DrawnBatch.of(whole_batch(5, NODE, 7)).stored()
    with pytest.raises(RunError, match="samples of prompt 7, which had 2 tokens then and has 1 now: `data` or"):
        DrawnBatch.read(tensors, stated, lambda uid: Prompt(uid, "", (1,)))


def test_checkpoints_from_before_turns_are_read() -> None:
    batch = DrawnBatch.of(whole_batch(5, NODE, 7))
    tensors, stated = batch.stored()
    for name in ("turns", "reply_errors"):
        del stated["rollouts"][str(NODE)][name]
    assert DrawnBatch.read(tensors, stated, prompt) == batch


def test_checkpoints_from_before_rounds_were_kept_are_read() -> None:
    """Their batches had ended: whatever prompt is not among the first was drawn again."""
    state = whole_batch(5, NODE, 7, 8, 11, 12)
    state.prompts = state.prompts[:2]
    state.growing[NODE] = PartialRollout(state.prompts, 2)
    state.growing[NODE].extend([prompt(11), prompt(12)])
    tensors, stated = DrawnBatch.of(state).stored()
    assert stated["rollouts"][str(NODE)].pop("further") == [[11, 12]]
    assert DrawnBatch.read(tensors, stated, prompt) == DrawnBatch.of(state)


def test_rounds_of_an_older_checkpoint_are_as_large_as_the_first() -> None:
    state = halted_batch(4, NODE)
    state.growing[NODE].extend([prompt(11), prompt(12)])
    state.growing[NODE].extend([prompt(13), prompt(14)])
    tensors, stated = DrawnBatch.of(state).stored()
    stated["rollouts"][str(NODE)]["further"] = [11, 12, 13, 14]
    assert DrawnBatch.read(tensors, stated, prompt) == DrawnBatch.of(state)


def test_a_checkpoint_of_no_open_batch_says_nothing_of_any() -> None:
    assert stored_drawn(()) == ({}, {})


def test_a_checkpoint_gives_the_batches_with_the_prompts_that_they_began_with(tmp_path: Path) -> None:
    batches = [DrawnBatch.of(whole_batch(5, NODE, 7, 8)), DrawnBatch.of(halted_batch(6, NODE))]
    tensors, stated = stored_drawn(batches)
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    store.save(5, tensors, stated)
    checkpoint = store.latest()
    assert checkpoint is not None
    assert read_drawn(checkpoint, prompt) == [
        (batches[0], (prompt(7), prompt(8))),
        (batches[1], (prompt(8), prompt(9))),
    ]


def test_a_sample_without_tokens_takes_none_of_its_neighbours() -> None:
    rows = Rows((sample(1, 0, ()), sample(1, 1, (9,)), sample(2, 0, ())))
    batch = DrawnBatch(0, 0, (1, 2), {NODE: rows.samples}, {NODE: (1, 2)}, (), {})
    read = DrawnBatch.read(*batch.stored(), prompt)
    assert [one.token_ids for one in read.samples[NODE]] == [(), (9,), ()]
    assert np.array_equal(Rows(read.samples[NODE]).offsets, rows.offsets)
