"""What a run works on next: prompts by their place in the run, given samples by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plait.data.examples import ExampleSet, Given, most_tokens
from plait.data.mismatched import mismatched
from plait.data.mixture import Stream
from plait.data.prompts import PromptSet
from plait.data.records import Prompt
from plait.dataflow import LABELLED, MISMATCHED


class Feed:
    """The data of a run. Everything is a function of the seed and of `drawn`, which a checkpoint keeps."""

    def __init__(
        self,
        prompts: Stream[PromptSet, Prompt] | None,
        given: Mapping[str, Stream[ExampleSet, Given]],
        per_step: int,
        drawn: int,
    ) -> None:
        self._prompts = prompts
        self._given = given
        self._per_step = per_step
        self.drawn = drawn
        """Prompts drawn so far; more than steps · prompts_per_step where a step had to draw again."""

    def draw(self, count: int, first: int | None = None) -> Sequence[Prompt]:
        """Prompts of the run: those behind all that were drawn, or from this place on."""
        if self._prompts is None:
            return ()
        first = self.drawn if first is None else first
        self.drawn = max(self.drawn, first + count)
        return self._prompts.take(first, count)

    def prompt(self, uid: int) -> Prompt:
        """The prompt of the run that has this uid."""
        assert self._prompts is not None, "a run that draws samples has prompts"
        (prompt,) = self._prompts.take(uid, 1)
        return prompt

    def given(self, step: int) -> dict[str, Sequence[Given]]:
        """The given samples of a step, by the name of the flow's parameter; of labelled ones also those that are made
        of them."""
        given: dict[str, Sequence[Given]] = {
            name: stream.take(step * self._per_step, self._per_step) for name, stream in self._given.items()
        }
        if LABELLED in given:
            given[MISMATCHED] = mismatched(given[LABELLED], most_tokens(self._given[LABELLED].mixed))
        return given

    def passes(self, step: int, drawn: int) -> dict[str, float]:
        """Passes over each source of the main data made in `step` steps, which took `drawn` prompts, by its label;
        empty where there is one."""
        main, count = self._main(step, drawn)
        return main.passes(count)

    def epoch(self, step: int, drawn: int) -> float:
        """Passes over the main data made in `step` steps, which took `drawn` prompts; a fraction included."""
        main, count = self._main(step, drawn)
        return main.epoch(count)

    def _main(self, step: int, drawn: int) -> tuple[Stream[Any, Any], int]:
        """The main data, and the instances of it that so many steps, or prompts, have taken."""
        if self._prompts is not None:
            return self._prompts, drawn
        return next(iter(self._given.values())), step * self._per_step
