"""Micro-batches in numbers: into how many a share of samples is cut, and the largest of them. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Self

from plait.cost.call_lengths import lengths_by_call
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.wide_columns import wide_numbers
from plait.dataflow import CallKind, Dataflow, Node, TrainOptions
from plait.dataflow.made_rows import prompts_each, samples_of_prompt
from plait.policy.packing import GroupTokens
from plait.recipes.recipe import Recipe
from plait.schedule.pipeline import micro_batches_of


def pieces(
    share: int, per_prompt: int, prompt: float, response: float, least: int, whole_groups: bool = False
) -> tuple[float, int]:
    """Prompts that are computed for `share` samples, `per_prompt` to a prompt, and in how many micro-batches: of the
    ways to cut a prompt's samples the one that takes a pipeline least, all tokens and one micro-batch to fill it
    (`training.micro_batches`).

    Args:
        least: micro-batches that are wanted.
        whole_groups: no prompt's samples are cut.
    """
    groups = max(1.0, share / per_prompt)
    ways = []
    for parts in range(1, per_prompt + 1 if least > 1 and not whole_groups else 2):
        count = max(1, min(least, share, int(groups * parts)))
        tokens = groups * parts * prompt + share * response
        ways.append((tokens * (1 + 1 / count), groups * parts, count))
    _, prompts, count = min(ways)
    return prompts, count


@dataclass(frozen=True)
class Cut:
    """How a share is cut into micro-batches.

    tokens: of each at most
    least, whole_groups: as of `training.micro_batches.split_over`
    numbers: as of `LargestBatch`
    """

    tokens: int
    least: int = 1
    whole_groups: bool = False
    numbers: int = 0


@dataclass(frozen=True)
class LargestBatch:
    """The largest micro-batch of a share, whose samples are at most as long as they may be; of given texts, where the
    share has the longest of these.

    tokens: of its row
    scores: attention scores of one head
    count: such micro-batches that the share has, those of calls whose gradients meet among them
    numbers: of each token, in columns of several numbers per token that the call reads or gives
    """

    tokens: int
    scores: int
    count: int = 1
    numbers: int = 0

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        flow: Dataflow,
        lengths: SampleLengths,
        role: str,
        *,
        trains: bool,
        dp: int = 1,
        pp: int = 1,
        budget_tokens: int | None = None,
    ) -> Self:
        """That of a role's copy, one of dp, in pp stages, in the call that has the largest.

        Args:
            lengths: of the prompts, or of the samples that are given.
            trains: or scores.
            budget_tokens: None: the recipe's.
        """
        num_samples = recipe.samples_per_prompt
        lengths_of = lengths_by_call(flow, lengths, num_samples)

        def of_call(node: Node) -> Self:
            rows, options = flow.nodes[node.rows], node.training if trains else TrainOptions()
            per_prompt, of_rows = samples_of_prompt(rows, num_samples), lengths_of[rows.id]
            if rows.kind is CallKind.GENERATE:
                most = rows.generation.limit(recipe.sampling.max_response_tokens)
                of_rows = SampleLengths(of_rows.prompts, Lengths.fixed(most))
            whole = per_prompt if options.whole_groups else 1
            samples = recipe.prompts_per_step * prompts_each(flow, rows, num_samples) * per_prompt
            share = share_of(samples, options.mini_batches, dp, whole)
            tokens = recipe.micro_batch_tokens if budget_tokens is None else budget_tokens
            cut = Cut(tokens, micro_batches_of(pp), options.whole_groups, wide_numbers(node))
            return cls.of_share(share, per_prompt, of_rows, cut)

        scores = [(node,) for node in flow.calls(role) if node.kind is CallKind.SCORE]
        batches: list[Self] = []
        for calls in flow.updates(role) if trains else scores:
            of_calls = [of_call(node) for node in calls]
            count = sum(batch.count for batch in of_calls)  # they are one behind the other
            batches += [replace(batch, count=count) for batch in of_calls]
        return max(batches, key=lambda batch: (batch.tokens, batch.scores, batch.numbers))

    @classmethod
    def of_share(cls, share: int, per_prompt: int, lengths: SampleLengths, cut: Cut) -> Self:
        """That of so many samples, cut as a run cuts them: as many micro-batches as are wanted, none above the budget
        but one of a single sample, or of a group that is never split. Where the budget bounds them they are filled, as
        samples that are shorter fit in.

        Args:
            lengths: of which the longest count.
        """
        if lengths.groups:
            return replace(cls._of_given(-(-share // per_prompt), lengths, cut), numbers=cut.numbers)
        prompts, response = lengths.prompts, lengths.responses.longest
        per_prompt, prompt, room = min(per_prompt, share), prompts.longest - prompts.root, cut.tokens - prompts.root
        if cut.whole_groups:
            units, each = -(-share // per_prompt), per_prompt
            wanted = min(cut.least, units)
        else:
            computed, wanted = pieces(share, per_prompt, prompt, response, cut.least)
            units, each = ceil(computed), ceil(share / computed)
        groups = -(-units // wanted)
        each = min(each, -(-share // groups))
        asked, fitting = groups * (prompt + each * response), room // (prompt + each * response)
        if fitting < 1 and not cut.whole_groups:
            each = max(1, min(each, (room - prompt) // response))
        groups = max(1, min(groups, fitting))
        alike = cls.of_groups(groups, each, prompts.longest, response, -(-share // (groups * each)), prompts.root)
        return replace(alike._filled(prompts.root + min(room, asked), prompts.root), numbers=cut.numbers)

    @classmethod
    def of_groups(
        cls, groups: int, each: int, prompt_tokens: int, response_tokens: int, count: int = 1, root_tokens: int = 0
    ) -> Self:
        """That of so many groups, all alike.

        Args:
            each: samples of a group.
            prompt_tokens: with the root that all prompts begin with.
        """
        of_group = GroupTokens(prompt_tokens, (response_tokens,) * each)
        tokens = root_tokens + groups * (of_group.total - root_tokens)
        return cls(tokens, root_tokens**2 + groups * _scores(of_group, root_tokens), count)

    def _filled(self, tokens: int, root: int) -> Self:
        """With so many tokens, if it has fewer: those that are added behind the root have scores as its own have."""
        if tokens <= self.tokens:
            return self
        times = (tokens - root) / (self.tokens - root)
        return replace(self, tokens=tokens, scores=root**2 + ceil(times * (self.scores - root**2)))

    @classmethod
    def _of_given(cls, num_groups: int, lengths: SampleLengths, cut: Cut) -> Self:
        """That of the largest given groups, the last of them in part. Texts are of many lengths, so that micro-batches
        are filled."""
        root = lengths.prompts.root
        room = max(1, cut.tokens - root)
        # Fewer lengths than groups: each stands for several.
        times = max(1.0, num_groups / len(lengths.groups))
        largest = lengths.groups[:num_groups]
        own = [group.total - root for group in largest]
        whole = times * sum(own)
        wanted = min(cut.least, num_groups)
        of_one = max(
            size if cut.whole_groups or size <= room else group.longest - root
            for size, group in zip(own, largest, strict=True)
        )
        filled = max(of_one, min(room, whole / wanted))
        left, scores = filled, float(root**2)
        for size, group in zip(own, largest, strict=True):
            part = min(times, left / size)
            scores += part * _scores(group, root)
            left -= part * size
            if left <= 0:
                break
        return cls(root + ceil(filled), ceil(scores), max(wanted, ceil(whole / room)))


def _scores(group: GroupTokens, root: int) -> int:
    """Attention scores of one head of what a group has behind the root."""
    of_responses = sum(tokens * (group.prompt + tokens) for tokens in group.responses)
    return (group.prompt - root) * group.prompt + of_responses


def share_of(samples: int, mini_batches: int, dp: int, together: int = 1) -> int:
    """Samples of one optimizer step, or with `mini_batches` 1 of a whole call, that the copy with most of them has.

    Args:
        together: samples that are never split, as of a group that stays whole; `samples` is a multiple of it.
    """
    units = samples // together
    return -(-units // (min(mini_batches, units) * dp)) * together
