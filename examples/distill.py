"""On-policy distillation: the policy answers, and a teacher says of each token how likely it would have been.

    plait train examples/my_recipe.yaml --algorithm examples/distill.py:distill --reward.functions '[]' \
        --reference.model TEACHER

The reference is the teacher; it has the tokens of the policy. No reward is needed, and no text of the teacher's. One
number of each token is enough here; `--algorithm distill` compares the distributions that tokens come from.
"""

from typing import Any

from plait.dataflow import Prompts, Role


def distill(prompts: Prompts, actor: Role, ref: Role) -> None:
    """The flow: plait keeps the graph of its calls."""
    ref.teaches()
    samples = actor.generate(prompts)
    actor.train(samples, loss=reverse_kl_loss, teacher_logprobs=ref.logprobs(samples))


def reverse_kl_loss(batch: Any, teacher_logprobs: Any) -> Any:
    """(log π − log π_teacher), held constant, times log π per token, which the policy itself has drawn: its gradient
    is that of KL(π ‖ π_teacher) at each place (Agarwal et al. 2023, arXiv 2306.13649; Gu et al. 2023, arXiv
    2306.08543)."""
    gap = batch.logprobs.detach() - teacher_logprobs
    batch.log("actor/reverse_kl", gap)
    return batch.aggregate(gap * batch.logprobs, "token-mean")
