"""Self-distillation: the policy learns what it says itself where its prompt says more.

    plait train examples/my_recipe.yaml --algorithm examples/self_distillation.py:sdft --reward.functions '[]' \
        --data.source examples/products.jsonl
    plait train examples/my_recipe.yaml --algorithm examples/self_distillation.py:sdpo --options.success 0.7

`sdft` shows the teacher a demonstration from the data (SDFT: Shenfeld et al. 2026, arXiv 2601.19897), here the column
`answer`; `sdpo` shows it what another sample of the same prompt has said that was good (SDPO: Hübotter et al. 2026,
arXiv 2601.20802), and learns nothing of samples without one.

The teacher is `ref`: the model that the run began with, or with `reference.sync_every: 1` and `reference.mixup: 0.05` a
slow average of the policy; or with `options.live` the policy itself, as it is in the step.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from pydantic import BaseModel, Field

from plait.algorithms.distill import divergence
from plait.dataflow import Prompts, Role, build_prompts, per_group


class Options(BaseModel):
    live: bool = False
    """The teacher has the policy's weights of the step."""
    beta: float = Field(1.0, ge=0, le=1)
    """Divergence from the teacher: 0 forward KL, 1 reverse KL, between them Jensen-Shannon."""
    top_k: int = 64
    """Likeliest tokens of the teacher that are compared; all others are as one."""
    success: float = 1.0
    """Of `sdpo`: the score from which on a sample is shown to the others of its prompt."""
    mini_batches: int = 1
    epochs: int = 1


def sdft(prompts: Prompts, actor: Role, ref: Role, options: Options) -> None:
    """The flow that learns from demonstrations."""
    samples = actor.generate(prompts)
    told = build_prompts(samples, with_demonstration, name="told")
    teacher = (actor if options.live else ref).top_logprobs(samples, options.top_k, prompts=told)
    actor.train(
        samples,
        loss=partial(divergence_loss, beta=options.beta),
        mini_batches=options.mini_batches,
        epochs=options.epochs,
        teacher_ids=teacher.ids,
        teacher_logprobs=teacher.logprobs,
    )


def sdpo(prompts: Prompts, actor: Role, ref: Role, reward: Role, options: Options) -> None:
    """The flow that learns from its own successes."""
    samples = actor.generate(prompts)
    scores = reward.score(samples)
    told = build_prompts(samples, partial(with_success, success=options.success), name="told", scores=scores)
    teacher = (actor if options.live else ref).top_logprobs(samples, options.top_k, prompts=told)
    actor.train(
        samples,
        loss=partial(divergence_loss, beta=options.beta),
        keep=per_group(is_shown_one, scores, name="shown", least_samples=2, success=options.success),
        mini_batches=options.mini_batches,
        epochs=options.epochs,
        teacher_ids=teacher.ids,
        teacher_logprobs=teacher.logprobs,
    )


def divergence_loss(batch: Any, teacher_ids: Any, teacher_logprobs: Any, *, beta: float) -> Any:
    """That of policy and teacher, mean over tokens."""
    divergences = divergence(batch.logprobs_at(teacher_ids), teacher_logprobs, beta)
    batch.log("actor/divergence", divergences)
    return batch.aggregate(divergences, "token-mean")


def with_demonstration(prompts: list[Any], answer: list[str]) -> list[Any]:
    """Called for the samples of one prompt at a time, as a reward function is; what it returns is read as prompts of
    the data are."""
    shown = "\n\nThis is an example of a right answer:\n\n{}\n\nAnswer in your own words."
    return [with_text(prompt, shown.format(right)) for prompt, right in zip(prompts, answer, strict=True)]


def with_success(prompts: list[Any], completions: list[Any], scores: np.ndarray, *, success: float) -> list[Any]:
    """Each prompt with the first good response of another sample; as it is where there is none."""
    shown = "\n\nThis was a right answer:\n\n{}\n\nAnswer the question."
    told = []
    for prompt, other in zip(prompts, good_others(scores, success), strict=True):
        told.append(prompt if other is None else with_text(prompt, shown.format(text_of(completions[other]))))
    return told


def is_shown_one(scores: np.ndarray, success: float) -> list[bool]:
    return [other is not None for other in good_others(scores, success)]


def good_others(scores: np.ndarray, success: float) -> Sequence[int | None]:
    """For each sample of a group the first other one whose score is good; None: there is none."""
    good = [place for place, score in enumerate(scores) if score >= success]
    return [next((other for other in good if other != place), None) for place in range(len(scores))]


def with_text(prompt: Any, text: str) -> Any:
    """A prompt, or its last message, with a text behind it."""
    if isinstance(prompt, str):
        return prompt + text
    *before, last = prompt
    return [*before, {**last, "content": last["content"] + text}]


def text_of(completion: Any) -> str:
    """A response; of one in messages the last."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
