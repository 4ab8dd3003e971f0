"""Tokens of replies are read and are in nothing else: what is computed of the others is what a mask leaves of all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plait.data.records import Reply, Sample
from plait.data.rows import Rows
from plait.dataflow import Level, Score
from tests.training.batches import run_all, train
from tests.training.test_masks_and_pairs import (
    BETA,
    BETA_VALUE,
    CASES,
    MASK,
    assert_close,
    assert_same_metrics,
    flat_gradients,
    language,
    masked_rows,
    rows_of,
    run_case,
    scalar,
)

OF_ALL_TOKENS = ("coverage", "rollout_")
"""Metrics of tokens that were drawn, trained or not."""
pytestmark = pytest.mark.usefixtures("exact_float64")


def with_replies(rows: Rows) -> Rows:
    """The same samples, of which the tokens that the mask leaves out are replies: they are in no column."""
    kept_R = rows.columns[MASK] > 0
    samples = tuple(
        _spoken(sample, kept_R[start:stop].tolist())
        for sample, start, stop in zip(rows.samples, rows.offsets, rows.offsets[1:], strict=False)
    )
    columns = {c: v[kept_R] if c.level is Level.TOKEN else v for c, v in rows.columns.items()}
    spoken = Rows(samples, columns)
    assert [s.all_ids for s in samples] == [s.token_ids for s in rows.samples]
    assert {len(s.replies) for s in samples} >= {0, 1, 2}
    return spoken


def _spoken(sample: Sample, kept: list[bool]) -> Sample:
    drawn: list[int] = []
    replies: list[Reply] = []
    for token, is_kept, followed in zip(sample.token_ids, kept, [False, *(not k for k in kept)], strict=False):
        if is_kept:
            drawn.append(token)
        elif followed and replies:
            replies[-1] = Reply(replies[-1].at, (*replies[-1].token_ids, token))
        else:
            replies.append(Reply(len(drawn), (token,)))
    logprobs = tuple(logprob for logprob, is_kept in zip(sample.logprobs, kept, strict=True) if is_kept)
    return replace(sample, token_ids=tuple(drawn), logprobs=logprobs, replies=tuple(replies))


@pytest.mark.parametrize("case", sorted(CASES))
def test_gradients_are_those_of_a_mask(case: str) -> None:
    rows = rows_of(case) if case != "reward" else masked_rows(pairs=True)  # one that has drawn nothing is in no pair
    expected, wanted, _ = run_case(case, rows)
    kind, loss, columns = CASES[case]
    trainer = {"language": language, "scalar": scalar}[kind]()
    asked: dict[str, Any] = {"whole_groups": case in ("dpo", "reward"), "batch_values": {BETA: BETA_VALUE}}
    _, metrics = run_all(train(trainer, with_replies(rows), columns, loss, **asked))
    assert_close(flat_gradients(trainer), expected)
    assert_same_metrics(metrics, {n: v for n, v in wanted.items() if not any(what in n for what in OF_ALL_TOKENS)})


@pytest.mark.parametrize("what", [Score.LOGPROBS, Score.ENTROPIES, Score.VALUES, Score.SCORE])
def test_scores_are_those_of_the_drawn_tokens_in_their_place(what: Score) -> None:
    rows = rows_of("critic")
    trainer = (language if what in (Score.LOGPROBS, Score.ENTROPIES) else scalar)()
    _, expected = run_all(trainer.score(rows, what))
    _, found = run_all(trainer.score(with_replies(rows), what))
    drawn = slice(None) if what is Score.SCORE else rows.columns[MASK] > 0
    np.testing.assert_allclose(found, expected[drawn], rtol=1e-12, atol=1e-12)
