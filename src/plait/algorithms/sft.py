"""SFT: supervised fine-tuning on given completions, the cross entropy of the tokens that are to be learnt.

Prompt tokens are in no loss; in a conversation, neither is what others than the assistant said.
"""

from __future__ import annotations

from functools import partial

from pydantic import Field

from plait.algorithms.losses import Aggregation, LossBatch, Tensor, cross_entropy
from plait.algorithms.options import UpdateOptions
from plait.dataflow import Given, Role


class SFTOptions(UpdateOptions):
    aggregation: Aggregation = Field(
        default=Aggregation.TOKEN_MEAN, description="token-mean, seq-mean-token-mean or seq-mean-token-sum-norm"
    )


def sft(examples: Given, actor: Role, options: SFTOptions) -> None:
    """The flow."""
    actor.train(
        examples,
        loss=partial(supervised, aggregation=options.aggregation),
        mask=examples.trained,
        mini_batches=options.mini_batches,
        epochs=options.epochs,
    )


def supervised(batch: LossBatch, *, aggregation: Aggregation = Aggregation.TOKEN_MEAN) -> Tensor:
    """The cross entropy, a scalar; logs besides how many of the trained tokens are the model's own choice."""
    batch.log("actor/mean_token_accuracy", batch.likeliest)
    return cross_entropy(batch, aggregation=aggregation)
