"""Texts of samples for engines that draft: how they travel, and which ones an instance has not drawn itself.

Shapes: P prompts, Q tokens of these one after another, N samples, T response tokens of these, replies included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from plait.data.records import FinishReason, Sample, logprobs_with
from plait.policy.step import Key
from plait.workers.ranks import LEADER


@dataclass(frozen=True)
class DrawnTexts:
    """Samples as a drafter records them, in 8 bytes a token; each prompt is there once.

    prompt_lengths_P: int32
    prompt_ids_Q:     int32
    prompts_N:        int32, the prompt of each sample
    lengths_N:        int32
    token_ids_T:      int32
    logprobs_T:       float32, 0 where nobody drew
    """

    prompt_lengths_P: NDArray[np.int32]
    prompt_ids_Q: NDArray[np.int32]
    prompts_N: NDArray[np.int32]
    lengths_N: NDArray[np.int32]
    token_ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]

    @classmethod
    def told_of(cls, samples: Sequence[Sample]) -> DrawnTexts:
        """In this order."""
        numbers: dict[tuple[int, ...], int] = {}
        places = [numbers.setdefault(sample.prompt.token_ids, len(numbers)) for sample in samples]
        texts = [sample.all_ids for sample in samples]
        logprobs = chain.from_iterable(logprobs_with(sample.replies, sample.logprobs) for sample in samples)
        return cls(
            np.array([len(prompt_ids) for prompt_ids in numbers], np.int32),
            np.fromiter(chain.from_iterable(numbers), np.int32),
            np.array(places, np.int32),
            np.array([len(text) for text in texts], np.int32),
            np.fromiter(chain.from_iterable(texts), np.int32),
            np.fromiter(logprobs, np.float32),
        )

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], list[int], list[float]]]:
        """The tokens of the prompt of each sample, its own, and their log-probs."""
        prompts = np.split(self.prompt_ids_Q, np.cumsum(self.prompt_lengths_P)[:-1]) if len(self.prompts_N) else []
        prompt_ids = [tuple(prompt.tolist()) for prompt in prompts]
        stop = 0
        for place, length in zip(self.prompts_N.tolist(), self.lengths_N.tolist(), strict=True):
            start, stop = stop, stop + length
            yield prompt_ids[place], self.token_ids_T[start:stop].tolist(), self.logprobs_T[start:stop].tolist()


def drafting_rank(ranks: Sequence[int]) -> int:
    """The rank of an instance that makes its drafts, of all its ranks."""
    return LEADER if LEADER in ranks else ranks[0]


class Untold:
    """What each instance of a role has drawn, and the others have not been told: of the newest as much as they keep.

    Args:
        most_tokens: that a drafter of an instance has room for.
    """

    def __init__(self, num_instances: int, most_tokens: int) -> None:
        self._num_instances, self._most_tokens = num_instances, most_tokens
        self._drawn: dict[Key, tuple[int, Sample]] = {}
        """The instance that ended each sample; the newest last."""
        self._num_tokens = 0

    def drew(self, sample: Sample, place: int) -> None:
        """An instance has given a sample out. One that is not finished goes on, and is told when it has ended. One that
        has ended and goes on with another turn is told as it is then."""
        if sample.finish_reason is FinishReason.OPEN or not sample.num_tokens:
            return
        key = sample.prompt.uid, sample.index
        if key in self._drawn:
            self._forget(key)
        self._drawn[key] = place, sample
        self._num_tokens += sample.num_tokens
        while self._num_tokens > self._most_tokens:
            self._forget(next(iter(self._drawn)))

    def take(self) -> list[tuple[int, list[Sample]]]:
        """(instance, what others have drawn), for each instance that has something to be told; they count as told."""
        shares = [
            (place, [sample for drawn_at, sample in self._drawn.values() if drawn_at != place])
            for place in range(self._num_instances)
        ]
        self.clear()
        return [(place, samples) for place, samples in shares if samples]

    def clear(self) -> None:
        """Nobody is to be told of what was drawn so far."""
        self._drawn.clear()
        self._num_tokens = 0

    def _forget(self, key: Key) -> None:
        _, sample = self._drawn.pop(key)
        self._num_tokens -= sample.num_tokens
