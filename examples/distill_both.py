"""Distillation on own samples and on given ones within a run: each step makes an update on either.

    plait train examples/my_recipe.yaml --algorithm examples/distill_both.py:both --reward.functions '[]' \
        --reference.model TEACHER --data.source PROMPTS.jsonl --pretraining.source EXAMPLES.jsonl

`--algorithm distill` takes one kind of samples; this is its loss on both. PROMPTS and EXAMPLES may be one file, with a
`prompt` and a `completion` in each row.
"""

from functools import partial

from plait.algorithms.distill import DistillOptions, distill_loss
from plait.dataflow import Given, Prompts, Role


def both(prompts: Prompts, examples: Given, actor: Role, ref: Role, options: DistillOptions) -> None:
    """The flow: two training calls, the second of which says its metrics under `actor.train#2`."""
    ref.teaches()
    loss = partial(distill_loss, beta=options.beta, aggregation=options.aggregation)
    for samples, mask in ((actor.generate(prompts), None), (examples, examples.trained)):
        teacher = ref.top_logprobs(samples, options.top_k)
        actor.train(
            samples,
            loss=loss,
            mask=mask,
            mini_batches=options.mini_batches,
            epochs=options.epochs,
            teacher_ids=teacher.ids,
            teacher_logprobs=teacher.logprobs,
        )
