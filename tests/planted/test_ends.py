"""The end token is trained like any other, also where it is the padding token: masks go by position, never by id."""

from __future__ import annotations

import pytest
import torch

from plait.algorithms.losses import Aggregation
from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import Rows
from plait.dataflow import Score
from tests.models.tiny import tiny_llama
from tests.training.batches import make_trainer, run_all, train

EOS = 2


def minus_logprob(batch):
    return batch.aggregate(-batch.logprobs, Aggregation.TOKEN_MEAN)


@pytest.mark.parametrize("pad", [0, EOS])
def test_the_end_token_is_learnt(pad: int) -> None:
    """A response that is nothing but an end token becomes likelier with each step, so it is in the loss."""
    model = tiny_llama(torch.float64)
    model.tokenizer.pad_token_id = pad
    trainer = make_trainer(model)
    rows = Rows((Sample(Prompt(0, "", (5, 6, 7)), 0, (EOS,), (-5.0,), "", FinishReason.STOP),))
    before = run_all(trainer.score(rows, Score.LOGPROBS))[1]
    _, metrics = run_all(train(trainer, rows, {}, minus_logprob))
    assert metrics["actor/loss"] == pytest.approx(-before[0])
    assert run_all(trainer.score(rows, Score.LOGPROBS))[1][0] > before[0] + 1e-3
