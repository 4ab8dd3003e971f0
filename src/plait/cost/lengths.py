"""Numbers of tokens: of prompts, of responses, of given texts. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from plait.errors import ConfigError
from plait.policy.packing import GroupTokens

Counts = TypeVar("Counts", float, NDArray[Any])


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens, as a sample of them: recorded ones, or evenly spaced quantiles of a distribution.

    Raises:
        ConfigError: there are none, or one is below 1.
    """

    values: tuple[int, ...]
    """Ascending, each at least 1."""
    root: int = 0
    """Tokens that all of them begin with, where they are prompts: a forward computes these once (`data.packed`)."""

    def __post_init__(self) -> None:
        if not self.values or min(self.values) < 1:
            raise ConfigError(f"lengths: expected numbers of tokens from 1 on, found {self.values!r:.80}")
        assert list(self.values) == sorted(self.values), "expected ascending lengths"
        assert 0 <= self.root < self.values[0], f"a root of {self.root} tokens, the shortest has {self.values[0]}"

    @classmethod
    def fixed(cls, tokens: int, root: int = 0) -> Lengths:
        return cls((tokens,), root)

    @classmethod
    def recorded(cls, values: Sequence[int], root: int = 0) -> Lengths:
        return cls(tuple(sorted(values)), root)

    @classmethod
    def lognormal(cls, median: float, sigma: float, longest: int, count: int = 256) -> Lengths:
        """Quantiles of a log-normal distribution, cut at `longest`, where a run cuts its responses.

        Raises:
            ConfigError: `median` is not above 0, `sigma` is below 0, or `longest` is below 1.
        """
        if not (median > 0 and sigma >= 0 and longest >= 1):
            raise ConfigError(
                f"lengths: expected a median above 0, sigma of 0 or more and a longest of at least 1, found {median}, "
                f"{sigma}, {longest}"
            )
        normal = NormalDist()
        drawn = (median * math.exp(sigma * normal.inv_cdf((i + 0.5) / count)) for i in range(count))
        return cls(tuple(max(1, min(longest, round(value))) for value in drawn))

    @property
    def longest(self) -> int:
        return self.values[-1]

    @cached_property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @cached_property
    def mean_square(self) -> float:
        return sum(value * value for value in self.values) / len(self.values)

    def of(self, count: int) -> tuple[int, ...]:
        """`count` lengths, evenly spaced quantiles, ascending."""
        return _quantiles(self.values, count)


@lru_cache(maxsize=512)
def _quantiles(values: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(values[(2 * i + 1) * len(values) // (2 * count)] for i in range(count))


@dataclass(frozen=True)
class SampleLengths:
    """Lengths of prompts and of responses, in tokens.

    groups: of given texts a sample of them, each prompt with its own responses, the largest first; else none: any
            response may follow any prompt
    beside: name of data that a flow reads beside the prompts that it generates from → lengths of that
    """

    prompts: Lengths
    responses: Lengths
    groups: tuple[GroupTokens, ...] = ()
    beside: Mapping[str, SampleLengths] = field(default_factory=dict)

    @classmethod
    def given(cls, groups: Sequence[GroupTokens], root: int = 0) -> SampleLengths:
        """Lengths of given texts.

        Args:
            groups: lengths of some of the texts, at least of one group, with the longest among them.
            root: number of tokens that all prompts begin with; each prompt is longer by at least one token.
        """
        ordered = sorted(groups, key=lambda group: (-group.total, -group.longest, group))
        prompts = Lengths.recorded([group.prompt for group in ordered], root)
        responses = Lengths.recorded([tokens for group in ordered for tokens in group.responses])
        return cls(prompts, responses, tuple(ordered))

    def of(self, rows: str) -> SampleLengths:
        """Those of rows that a call of this name makes or reads (`actor.generate`, `examples`)."""
        return self.beside.get(rows, self)

    def answered(self, responses: Lengths, read: Sequence[tuple[Lengths, int]] = ()) -> SampleLengths:
        """Lengths of samples with these responses, to prompts that a function writes from the samples here. What it
        writes is not known: each prompt counts as the sample with its prompt, and the texts that are read with it.

        Args:
            read: of texts that the function is given: their lengths, and how many of them with each sample.
        """
        if self.groups:
            samples = sorted(prompt + tokens for prompt, tokens in self._pairs)
        else:
            count = max(len(own.values) for own in (self.prompts, self.responses, *(texts for texts, _ in read)))
            samples = map(sum, zip(self.prompts.of(count), self.responses.of(count), strict=True))
        prompts = list(samples)
        beside = [[number * tokens for tokens in texts.of(len(prompts))] for texts, number in read]
        return SampleLengths(Lengths.recorded([sum(row) for row in zip(prompts, *beside, strict=True)]), responses)

    def cut(self, most: int | None) -> SampleLengths:
        """With responses of so many tokens at most; None: as they are."""
        if most is None or most >= self.responses.longest:
            return self
        return replace(self, responses=Lengths.recorded([min(most, tokens) for tokens in self.responses.values]))

    @property
    def longest(self) -> int:
        """Tokens of the longest sample with its prompt, the root among them."""
        if self.groups:
            return max(group.longest for group in self.groups)
        return self.prompts.longest + self.responses.longest

    @cached_property
    def _pairs(self) -> tuple[tuple[int, int], ...]:
        """Each given sample: tokens of its prompt, and its own."""
        return tuple((group.prompt, tokens) for group in self.groups for tokens in group.responses)

    @cached_property
    def _product(self) -> float:
        """Tokens of a response times those of its prompt, in the mean."""
        if not self.groups:
            return self.prompts.mean * self.responses.mean
        return sum(prompt * tokens for prompt, tokens in self._pairs) / len(self._pairs)

    def pairs(self, prompts: float, samples: float, roots: float) -> float:
        """Pairs of a query and a key, of so many prompts and samples of them.

        Args:
            roots: how often the root of the prompts is computed, at most once for each.
        """
        p, r = self.prompts, self.responses
        spared = max(0.0, prompts - roots) * p.root * (p.root + 1) / 2
        of_prompts = prompts * (p.mean_square + p.mean) / 2 - spared
        return of_prompts + samples * (self._product + (r.mean_square + r.mean) / 2)

    def near_pairs(
        self, windows: Iterable[int], prompts: float, samples: float, roots: float
    ) -> tuple[tuple[int, float], ...]:
        """Window → those of them that are within it, of windows that are shorter than some sample."""
        p, r = self.prompts, self.responses
        longest = self.longest if samples else p.longest
        shorter = [window for window in sorted(set(windows)) if 0 < window < longest]
        if not shorter:
            return ()
        pairs = self._pairs or [(p.mean, tokens) for tokens in r.values]
        of_prompt, before, said = (np.array(counts) for counts in (p.values, *zip(*pairs, strict=True)))
        near = []
        for window in shorter:
            of_response = pairs_within(before + said, window) - pairs_within(before, window)
            spared = max(0.0, prompts - roots) * pairs_within(p.root, window)
            of_prompts = prompts * float(pairs_within(of_prompt, window).mean()) - spared
            near.append((window, of_prompts + samples * float(of_response.mean())))
        return tuple(near)


def pairs_within(tokens: Counts, window: int) -> Counts:
    """Pairs of so many tokens that follow each other, of which each sees itself and those before it in the window.

    Args:
        tokens: a number, or an array of them.
        window: 0: each sees all before it.
    """
    full: Any = np.minimum(tokens, window) if window else tokens
    return full * (full + 1) / 2 + (tokens - full) * window
