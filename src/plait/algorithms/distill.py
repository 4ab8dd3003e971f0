"""Distillation: the policy learns the distributions of a teacher, token by token (Agarwal et al. 2023, GKD, arXiv
2306.13649), on its own samples or on given examples.

The teacher is the role `ref`. Both models say how likely the teacher's `top_k` likeliest tokens are at each place, and
how likely all others are together: two distributions over `top_k` + 1 outcomes, whose divergence is the loss. With as
many as the vocabulary has it is that over the whole vocabulary.

Shapes: R response tokens, J = `top_k` + 1 outcomes.
"""

from __future__ import annotations

import math
from functools import partial

from pydantic import Field

from plait.algorithms.losses import Aggregation, LossBatch, Tensor
from plait.algorithms.options import UpdateOptions
from plait.dataflow import Given, Prompts, Role


class DistillOptions(UpdateOptions):
    beta: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="divergence of the policy from the teacher: 0 KL(teacher ‖ policy), 1 KL(policy ‖ teacher), "
        "between them the generalised Jensen-Shannon divergence",
    )
    top_k: int = Field(
        default=64, ge=1, description="likeliest tokens of the teacher that are compared; all others are as one"
    )
    on_policy: bool = Field(default=True, description="learn on samples of the policy; false: on given examples")
    aggregation: Aggregation = Field(
        default=Aggregation.TOKEN_MEAN, description="token-mean, seq-mean-token-mean or seq-mean-token-sum-norm"
    )


def distill(prompts: Prompts, examples: Given, actor: Role, ref: Role, options: DistillOptions) -> None:
    """The flow."""
    ref.teaches()
    samples = actor.generate(prompts) if options.on_policy else examples
    teacher = ref.top_logprobs(samples, options.top_k)
    actor.train(
        samples,
        loss=partial(distill_loss, beta=options.beta, aggregation=options.aggregation),
        mask=None if options.on_policy else examples.trained,
        mini_batches=options.mini_batches,
        epochs=options.epochs,
        teacher_ids=teacher.ids,
        teacher_logprobs=teacher.logprobs,
    )


def distill_loss(
    batch: LossBatch,
    teacher_ids: Tensor,
    teacher_logprobs: Tensor,
    *,
    beta: float,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Tensor:
    """Aggregate of the `divergence` of policy and teacher at each token.

    Logs per token: `actor/divergence`; `ref/top_mass` and `actor/top_mass`, what the teacher and the policy give the
    tokens that are compared one by one; `actor/agreement`, 1 where of these none is likelier for the policy than the
    teacher's likeliest.

    Args:
        teacher_ids: [R, J − 1].
        teacher_logprobs: [R, J].
    """
    logprobs_RJ = batch.logprobs_at(teacher_ids)
    divergence_R = divergence(logprobs_RJ, teacher_logprobs, beta)
    batch.log("actor/divergence", divergence_R)
    batch.log("actor/top_mass", 1 - logprobs_RJ[:, -1].detach().exp())
    batch.log("ref/top_mass", 1 - teacher_logprobs[:, -1].exp())
    own_RK = logprobs_RJ[:, :-1].detach()
    batch.log("actor/agreement", (own_RK[:, 0] >= own_RK.amax(-1)).to(own_RK.dtype))
    return batch.aggregate(divergence_R, aggregation)


def divergence(logprobs_RJ: Tensor, teacher_logprobs_RJ: Tensor, beta: float) -> Tensor:
    """The generalised Jensen-Shannon divergence of two distributions at each place (Agarwal et al. 2023, eq. 1), of q
    of the teacher and p of the policy, with m = β q + (1 − β) p: β KL(q ‖ m) + (1 − β) KL(p ‖ m). It goes to 0 with β
    and with 1 − β, so that there it is KL(q ‖ p), and KL(p ‖ q), as in TRL.

    Args:
        logprobs_RJ: of the policy.

    Returns:
        [R], nats.
    """
    if beta in (0, 1):
        q_RJ, p_RJ = (teacher_logprobs_RJ, logprobs_RJ) if beta == 0 else (logprobs_RJ, teacher_logprobs_RJ)
        return _kl(q_RJ, p_RJ)
    mixed_RJ = (teacher_logprobs_RJ + math.log(beta)).logaddexp(logprobs_RJ + math.log1p(-beta))
    return beta * _kl(teacher_logprobs_RJ, mixed_RJ) + (1 - beta) * _kl(logprobs_RJ, mixed_RJ)


def _kl(logprobs_RJ: Tensor, other_logprobs_RJ: Tensor) -> Tensor:
    """KL(first ‖ other) [R]."""
    return (logprobs_RJ.exp() * (logprobs_RJ - other_logprobs_RJ)).sum(-1)
