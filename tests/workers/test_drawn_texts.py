"""What instances that draft are told of each other's samples, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plait.data.records import FinishReason, Prompt, Reply, Sample
from plait.workers.drawn_texts import DrawnTexts, Untold
from plait.workers.upkeep import Recall


def sample(uid: int, index: int, *token_ids: int, reason: FinishReason = FinishReason.STOP) -> Sample:
    return Sample(Prompt(uid, "", (uid, uid)), index, token_ids, (-0.5,) * len(token_ids), "", reason)


def test_texts_travel_in_eight_bytes_a_token() -> None:
    """Replies are part of a text, and nobody drew them; of a prompt all samples share the tokens."""
    turns = replace(sample(7, 1, 5, 6), replies=(Reply(1, (8, 9)),))
    told = Recall("actor", DrawnTexts.told_of([sample(7, 0, 3), turns, sample(4, 0, 2, 2, 2)]))
    message = told.to_message()
    assert message.num_array_bytes == 2 * 4 + 4 * 4 + 3 * (4 + 4) + 8 * (4 + 4), "2 prompts, 3 samples, 8 tokens"
    assert list(Recall.of(message).texts) == [
        ((7, 7), [3], [-0.5]),
        ((7, 7), [5, 8, 9, 6], [-0.5, 0.0, 0.0, -0.5]),
        ((4, 4), [2, 2, 2], [-0.5] * 3),
    ]
    assert list(DrawnTexts.told_of([])) == []


def test_log_probs_are_as_exact_as_what_drafters_keep() -> None:
    drawn = replace(sample(1, 0, 3), logprobs=(-1.0 / 3,))
    [(_, _, [logprob])] = DrawnTexts.told_of([drawn])
    assert np.float32(np.exp(logprob)) == pytest.approx(np.float32(np.exp(-1 / 3)), rel=1e-6)


def test_each_instance_is_told_what_others_have_drawn_once_and_whole() -> None:
    """The newest of a sample that went on counts, wherever that was; of one that is not finished, nothing."""
    untold = Untold(3, most_tokens=100)
    first, second = sample(1, 0, 5, 5), sample(2, 0, 6)
    longer = sample(1, 0, 5, 5, 5)
    for one, place in ((first, 0), (second, 1), (longer, 2), (sample(3, 0, 1, reason=FinishReason.OPEN), 0)):
        untold.drew(one, place)
    assert untold.take() == [(0, [second, longer]), (1, [longer]), (2, [second])]
    assert untold.take() == []


def test_of_more_than_a_drafter_keeps_the_newest_are_told() -> None:
    untold = Untold(2, most_tokens=5)
    for uid in range(4):
        untold.drew(sample(uid, 0, 1, 1), 0)
    assert [(place, [one.prompt.uid for one in told]) for place, told in untold.take()] == [(1, [2, 3])]


def test_who_is_cleared_tells_nothing() -> None:
    untold = Untold(2, most_tokens=5)
    untold.drew(sample(1, 0, 1, 1), 0)
    untold.clear()
    untold.drew(sample(2, 0, 1, 1, 1, 1), 1)
    assert [(place, [one.prompt.uid for one in told]) for place, told in untold.take()] == [(0, [2])]
