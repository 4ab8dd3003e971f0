"""A rollout under way: which of its samples have ended, and how long the others are so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from plait.data.records import Prompt, Sample
from plait.policy.packing import root_of
from plait.policy.score_parts import SampleLength, ScoredPart
from plait.policy.step import Key

HEARD = 16
"""Steps of generation that are news as the end of a sample is: the lengths of running samples may settle the next
parts."""


class PartialRollout:
    """A rollout under way: its finished samples, by group, and the lengths of the others.

    Args:
        count: samples of each prompt.
        further: the prompts of each further round that has begun.
    """

    def __init__(self, prompts: Sequence[Prompt], count: int, further: Sequence[Sequence[Prompt]] = ()) -> None:
        self.prompts = tuple(prompts)
        self.rounds: list[tuple[Prompt, ...]] = [self.prompts]
        """Those that it began with, then those of each further round (`extend`)."""
        self.count = count
        self.root_tokens = root_of([prompt.token_ids for prompt in prompts])
        """That all prompts begin with: each forward computes them once."""
        self.groups: dict[int, list[Sample]] = {prompt.uid: [] for prompt in prompts}
        self.num_finished = 0
        """Finished samples."""
        self.news = 0
        """Grows when a sample ends, and every HEARD times that the lengths of others are told."""
        self._said: Mapping[Key, int] = {}
        self._times_heard = 0
        for of_round in further:
            self.extend(of_round)

    def extend(self, prompts: Sequence[Prompt]) -> None:
        """Ask for samples of a further round's prompts."""
        self.rounds.append(tuple(prompts))
        self.prompts += self.rounds[-1]
        self.root_tokens = root_of([prompt.token_ids for prompt in self.prompts])
        self.groups |= {prompt.uid: [] for prompt in prompts}

    @property
    def unfinished(self) -> Iterator[tuple[int, int]]:
        """(prompt uid, index) of each sample that is not finished."""
        for uid, group in self.groups.items():
            finished = {sample.index for sample in group}
            yield from ((uid, index) for index in range(self.count) if index not in finished)

    @property
    def whole(self) -> list[list[Sample]]:
        """Groups of which all samples are finished, each by index."""
        return [
            sorted(group, key=lambda sample: sample.index) for group in self.groups.values() if len(group) == self.count
        ]

    @property
    def num_asked(self) -> int:
        """Samples that the rollout will have."""
        return self.count * len(self.prompts)

    def take(self, sample: Sample) -> list[Sample] | None:
        """Add a finished sample; its group, by index, if it was the last of the group."""
        group = self.groups[sample.prompt.uid]
        group.append(sample)
        self.news += 1
        self.num_finished += 1
        if len(group) < self.count:
            return None
        group[:] = _with_one_prompt(sorted(group, key=lambda member: member.index))
        return group

    def hear(self, said: Mapping[Key, int]) -> None:
        """Tell the tokens that unfinished samples have at least; nothing is known of samples that are not named."""
        self._said = said
        self._times_heard += 1
        self.news += self._times_heard % HEARD == 0

    def lengths_of(self, uid: int) -> list[SampleLength]:
        """The lengths of a prompt's samples, by index."""
        finished = {sample.index: sample.num_tokens for sample in self.groups[uid]}
        return [
            SampleLength(finished[index], ended=True)
            if index in finished
            else SampleLength(self._said.get((uid, index), 0), ended=False)
            for index in range(self.count)
        ]

    def samples_of(self, piece: ScoredPart) -> list[Sample]:
        """The samples of a piece, which have all ended."""
        group = self.groups[self.prompts[piece.place].uid]
        if len(piece.indices) == self.count:
            return group
        return [sample for sample in group if sample.index in piece.indices]


def _with_one_prompt(group: Sequence[Sample]) -> list[Sample]:
    """The samples of a prompt, of which each has the prompt's experts of the first that says any: where the prompt was
    computed several times, by other roundings or by other weights, those may differ. It is not the first that ended:
    that may depend on the clock."""
    prompt = next((sample.experts.prompt for sample in group if sample.experts is not None), None)
    return [
        sample
        if sample.experts is None or prompt is None
        else replace(sample, experts=replace(sample.experts, prompt=prompt))
        for sample in group
    ]
