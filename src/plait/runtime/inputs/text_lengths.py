"""How many tokens the texts of a run's data have, as predictions count them: known before the run begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from plait.cost.lengths import Lengths, SampleLengths
from plait.data.examples import ExampleSet, most_tokens
from plait.data.mixture import Mixed
from plait.data.prompts import PromptSet
from plait.dataflow import LABELLED, MISMATCHED
from plait.policy.packing import LEAST_ROOT, GroupTokens, common_length

PREDICTED_ROWS = 512
"""Rows whose lengths stand for those of more."""

Length = TypeVar("Length")


def lengths_in(
    train_set: Mixed[PromptSet] | None, given: Mapping[str, Mixed[ExampleSet]], max_response_tokens: int
) -> SampleLengths:
    """The lengths of prompts, with responses that are as long as they may be; without prompts those of the samples
    that are given (`examples`, `pairs` or `labelled`), each prompt with its own responses; beside labelled ones those
    with responses of others (`mismatched`). With what they begin with.

    Each source counts by its share of what is drawn. All rows are taken where they are few, else evenly spaced ones
    of each source in the order of their lengths, the longest among them.
    """
    of_given = {name: _of_given(sets) for name, sets in given.items()}
    if LABELLED in given:
        of_given[MISMATCHED] = _of_mismatched(given[LABELLED])
    if train_set is None:
        main, *others = of_given
        return replace(of_given[main], beside={name: of_given[name] for name in others})
    prompts = Lengths.recorded(_taken(train_set, lambda tokens: (tokens,)), _root(train_set))
    return SampleLengths(prompts, Lengths.fixed(max_response_tokens), beside=of_given)


def longest_given(tokens: int, name: str) -> SampleLengths:
    """Lengths of given samples (a parameter of the flow) if only the largest number of tokens is known. All but one
    token count as response, which takes the most memory."""
    return SampleLengths.given([GroupTokens(1, (max(1, tokens - 1),) * (2 if name == "pairs" else 1))])


def _of_given(mixed: Mixed[ExampleSet]) -> SampleLengths:
    taken = _taken(mixed, lambda group: (group.total, group.longest, group))
    longest = max((group for rows in mixed.sets for group in rows.lengths), key=lambda group: group.longest)
    if all(group.longest < longest.longest for group in taken):  # the longest pair has not always the longest sample
        taken.append(longest)
    return SampleLengths.given(taken, _root(mixed))


def _of_mismatched(mixed: Mixed[ExampleSet]) -> SampleLengths:
    """Any response may follow any prompt, as far as the length limit allows: of rows in the order of their lengths
    each has that of one half the rows away; and the longest prompt has the longest response."""
    taken = _taken(mixed, lambda group: (group.total, group.longest, group))
    half, rows = len(taken) // 2, [group for of_source in mixed.sets for group in of_source.lengths]
    pairs = [(own.prompt, *other.responses) for own, other in zip(taken, taken[half:] + taken[:half], strict=True)]
    pairs.append((max(group.prompt for group in rows), max(group.responses[0] for group in rows)))
    limit = most_tokens(mixed)
    return SampleLengths.given([GroupTokens(p, (min(response, limit - p),)) for p, response in pairs], _root(mixed))


def _root(mixed: Mixed[Any]) -> int:
    """Tokens that the prompts of all sources begin with, as far as that is shared by a forward."""
    root = common_length([rows.root for rows in mixed.sets])
    return root if root >= LEAST_ROOT else 0


def _taken(mixed: Mixed[Any], key: Callable[[Any], tuple[Any, ...]]) -> list[Any]:
    """Lengths of rows of all sources; `key` orders those of one."""
    total, weights = len(mixed), sum(mixed.weights)
    shares = list(zip(mixed.sets, mixed.weights, strict=True))
    is_whole = total <= PREDICTED_ROWS and all(weight * total == len(rows) * weights for rows, weight in shares)
    taken = []
    for rows, weight in shares:
        count = len(rows) if is_whole else max(1, round(PREDICTED_ROWS * weight / weights))
        taken += _spaced(sorted(rows.lengths, key=key), count)
    return taken


def _spaced(ordered: Sequence[Length], count: int) -> list[Length]:
    """So many of them, evenly spaced, the last one among them."""
    return [*(ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count - 1)), ordered[-1]]
