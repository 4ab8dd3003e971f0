"""Micro-batches in numbers: into how many a share of samples is cut, and the largest of them. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Self

from plait.cost.lengths import Lengths
from plait.dataflow import CallKind, Dataflow
from plait.recipes.recipe import Recipe
from plait.schedule.pipeline import micro_batches_of


def pieces(share: int, per_prompt: int, prompt: float, response: float, least: int) -> tuple[float, int]:
    """Prompts that are computed for `share` samples, `per_prompt` to a prompt, and in how many micro-batches: of the
    ways to cut a prompt's samples the one that takes a pipeline least, all tokens and one micro-batch to fill it
    (`training.micro_batches`).

    Args:
        least: micro-batches that are wanted.
    """
    groups = max(1.0, share / per_prompt)
    ways = []
    for parts in range(1, per_prompt + 1 if least > 1 else 2):
        count = max(1, min(least, share, int(groups * parts)))
        tokens = groups * parts * prompt + share * response
        ways.append((tokens * (1 + 1 / count), groups * parts, count))
    _, prompts, count = min(ways)
    return prompts, count


@dataclass(frozen=True)
class LargestBatch:
    """The largest micro-batch of a share, where all samples are as long as they may be.

    prompt_tokens: with the root
    count: such micro-batches that the share has
    root_tokens: that all prompts begin with
    """

    groups: int
    samples_per_group: int
    prompt_tokens: int
    response_tokens: int
    count: int = 1
    root_tokens: int = 0

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        flow: Dataflow,
        longest_texts: Lengths,
        role: str,
        *,
        trains: bool,
        dp: int = 1,
        pp: int = 1,
        budget_tokens: int | None = None,
    ) -> Self:
        """That of a role's copy, one of dp, in pp stages.

        Args:
            longest_texts: the longest of the prompts; where nothing is generated, of the given samples.
            trains: or scores.
            budget_tokens: None: the recipe's.
        """
        rollouts = flow.of_kind(CallKind.GENERATE)
        if rollouts:
            per_prompt = max(node.generation.num_samples(recipe.samples_per_prompt) for node in rollouts)
            prompt, response = longest_texts, recipe.sampling.max_response_tokens
        else:
            pairs = any(node.call == "pairs" for node in flow.of_kind(CallKind.READ))
            per_prompt, prompt, response = 2 if pairs else 1, Lengths.fixed(1), longest_texts.longest - 1
        options = [node.training for node in flow.calls(role) if node.kind is CallKind.TRAIN] if trains else []
        return cls.of_share(
            share_of(recipe.prompts_per_step * per_prompt, min((how.mini_batches for how in options), default=1), dp),
            per_prompt,
            prompt,
            response,
            recipe.micro_batch_tokens if budget_tokens is None else budget_tokens,
            least=micro_batches_of(pp),
            whole_groups=any(how.whole_groups for how in options),
        )

    @classmethod
    def of_share(
        cls,
        share: int,
        per_prompt: int,
        prompts: Lengths,
        response: int,
        budget_tokens: int,
        *,
        least: int = 1,
        whole_groups: bool = False,
    ) -> Self:
        """That of so many samples, cut as a run cuts them: as many micro-batches as are wanted, none above the budget
        but one of a single sample, or of a group that is never cut.

        Args:
            prompts: of which the longest counts.
            response: tokens of each.
            least, whole_groups: as of `training.micro_batches.split_over`.
        """
        per_prompt, prompt, room = min(per_prompt, share), prompts.longest - prompts.root, budget_tokens - prompts.root
        if whole_groups:
            cut, each = -(-share // per_prompt), per_prompt
            wanted = min(least, cut)
        else:
            computed, wanted = pieces(share, per_prompt, prompt, response, least)
            cut, each = ceil(computed), ceil(share / computed)
        groups = -(-cut // wanted)
        each = min(each, -(-share // groups))
        fitting = room // (prompt + each * response)
        if fitting < 1 and not whole_groups:
            each = max(1, min(each, (room - prompt) // response))
        groups = max(1, min(groups, fitting))
        return cls(groups, each, prompts.longest, response, -(-share // (groups * each)), prompts.root)

    @property
    def tokens(self) -> int:
        own = self.prompt_tokens - self.root_tokens
        return self.root_tokens + self.groups * (own + self.samples_per_group * self.response_tokens)

    @property
    def scores(self) -> int:
        """Attention scores of one head."""
        own, response = self.prompt_tokens - self.root_tokens, self.samples_per_group * self.response_tokens
        of_group = own * self.prompt_tokens + response * (self.prompt_tokens + self.response_tokens)
        return self.root_tokens**2 + self.groups * of_group


def share_of(samples: int, mini_batches: int, dp: int) -> int:
    """Samples of one optimizer step, or with `mini_batches` 1 of a whole call, that the copy with most of them has."""
    return -(-samples // (min(mini_batches, samples) * dp))
