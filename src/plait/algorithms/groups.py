"""What the flows that compare the responses of a group have in common: which groups they train on, what truncated and
long responses get, and which responses are left out of the loss."""

from __future__ import annotations

from typing import ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from plait.algorithms.advantages import FloatArray
from plait.algorithms.options import KLPlaceOptions
from plait.algorithms.surrogates import OF_RESPONSES, Ratio
from plait.dataflow import Generated, Prompts, Resample, Role, per_sample
from plait.dataflow.handles import ColumnHandle


class GroupOptions(KLPlaceOptions):
    """Options of algorithms whose advantage is a response's score against those of others. Without a critic: one learns
    from the responses of every group, and needs all of them."""

    stop_properly_penalty_coef: float | None = Field(
        default=None,
        le=1,
        description="the score of a truncated response counts so many times (ProRL), below 0 it is this number; null: "
        "as it is",
    )
    overlong_buffer_tokens: int = Field(
        default=0, ge=0, description="within this many tokens of the limit a response is penalised (DAPO); 0: never"
    )
    overlong_penalty: float = Field(default=1.0, ge=0, description="penalty of a response that uses the whole limit")
    mask_truncated: bool = Field(
        default=False, description="truncated responses count in the baseline, but are not trained on"
    )
    dynamic_sampling: bool = Field(
        default=False, description="draw prompts until no group of the step has equal scores (DAPO)"
    )
    max_sampling_rounds: int = Field(
        default=10,
        ge=1,
        description="rounds of dynamic_sampling at most, the first one included, and groups of so many full rounds",
    )

    def check_read(self) -> None:
        super().check_read()
        self._check_switch("overlong_buffer_tokens", "`options.overlong_buffer_tokens` above 0", "overlong_penalty")
        self._check_switch("dynamic_sampling", "`options.dynamic_sampling` to true", "max_sampling_rounds")


class ResponseOptions(GroupOptions):
    """Options of algorithms that give all tokens of a response one advantage, so that it may be weighed as a whole."""

    has_advantages_of_responses: ClassVar[bool] = True

    ratio: Ratio = Field(default=Ratio.TOKEN, description="token, sequence-mean (GSPO) or sequence-product")

    @model_validator(mode="after")
    def _check_ratio(self) -> Self:
        if self.loss_type in OF_RESPONSES and self.ratio is not Ratio.TOKEN:
            raise ValueError(
                f"loss_type: {self.loss_type} takes the ratio of a response by itself, found ratio: {self.ratio}; set "
                "`options.ratio` to token"
            )
        return self


def generate_groups(actor: Role, prompts: Prompts, reward: Role, options: GroupOptions) -> Generated:
    """The samples of the step; with `dynamic_sampling` of groups whose scores differ."""
    if not options.dynamic_sampling:
        return actor.generate(prompts)
    resample = Resample(keep=informative, reward=reward, max_rounds=options.max_sampling_rounds)
    return actor.generate(prompts, resample=resample)


def shaped_scores(scores: ColumnHandle, samples: Generated, options: GroupOptions) -> ColumnHandle:
    """The scores [sample], those of truncated responses by `stop_properly_penalty_coef`, then those of long ones by the
    soft overlong punishment."""
    if options.stop_properly_penalty_coef is not None:
        scores = per_sample(
            stopped_properly,
            scores,
            samples.finished,
            name="scores_of_stopped",
            coef=options.stop_properly_penalty_coef,
        )
    if options.overlong_buffer_tokens > 0:
        scores = per_sample(
            subtract_overlong,
            scores,
            samples.tokens_left,
            name="shaped_rewards",
            buffer_tokens=options.overlong_buffer_tokens,
            penalty=options.overlong_penalty,
        )
    return scores


def kept_in_loss(samples: Generated, options: GroupOptions) -> ColumnHandle | None:
    """[sample]: 1 for a response that is trained on; None: all are."""
    return samples.finished if options.mask_truncated else None


def informative(scores: FloatArray) -> bool:
    """Whether a group teaches anything: its scores differ (Yu et al. 2025, DAPO, eq. 11: some right, some wrong)."""
    return len(scores) > 1 and bool(np.ptp(scores) > 0)


def stopped_properly(score: float, finished: float, coef: float) -> float:
    """The stop-properly penalty of ProRL v2 (NVIDIA 2025) as OpenRLHF and NeMo RL have it: a truncated response gets
    coef times its score, and in OpenRLHF coef itself where it is below 0."""
    if finished:
        return score
    return coef if coef < 0 else coef * score


def subtract_overlong(reward: float, tokens_left: float, buffer_tokens: int, penalty: float) -> float:
    """Soft overlong punishment (Yu et al. 2025, DAPO, arXiv 2503.14476, eq. 13).

    Nothing while at least `buffer_tokens` are left below the response limit, then linear, `penalty` at the limit.
    """
    return reward - penalty * max(0.0, buffer_tokens - tokens_left) / buffer_tokens
