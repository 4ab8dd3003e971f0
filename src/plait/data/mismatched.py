"""Prompts with completions of other rows. Nothing of them is learnt: from what policy and reference say of them KTO
estimates a KL. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.data.examples import Given

MOST_PLACES = 64
"""By so many completions move on at most."""


def mismatched(batch: Sequence[Given], max_tokens: int) -> list[Given]:
    """The prompts of a batch of labelled responses, each with the completion of another one: all completions move on by
    one place, the last one to the first prompt, as in TRL. Where prompts come more than once in the batch, they move by
    the fewest places, up to `MOST_PLACES`, that leave the fewest of them with a prompt of their own.

    A completion that is too long behind its new prompt is cut, as by TRL. A function of the batch alone, whatever the
    devices.

    Args:
        max_tokens: of prompt and completion; no prompt has so many.
    """
    numbers: dict[tuple[int, ...], int] = {}
    prompts = [numbers.setdefault(given.sample.prompt.token_ids, len(numbers)) for given in batch]
    shift = _least_shift(prompts)
    return [_behind(given, batch[place - shift], max_tokens) for place, given in enumerate(batch)]


def _least_shift(prompts: Sequence[int]) -> int:
    """By how many places to move, see `mismatched`; equal numbers are equal prompts."""
    best, least = 1, len(prompts) + 1
    for shift in range(1, min(len(prompts), MOST_PLACES + 1)):
        own = sum(prompt == prompts[place - shift] for place, prompt in enumerate(prompts))
        if own < least:
            best, least = shift, own
        if own == 0:
            break
    return best


def _behind(given: Given, other: Given, max_tokens: int) -> Given:
    """The completion of another row behind the prompt of this one."""
    prompt = given.sample.prompt
    room = max_tokens - len(prompt.token_ids)
    assert room > 0, f"prompt {prompt.uid} leaves no token for a completion"
    sample = replace(other.sample, prompt=prompt, token_ids=other.sample.token_ids[:room])
    return Given(sample, other.trained[:room])
