"""What evaluations are made on: sets of held-out items, read and encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plait.data.examples import Given
from plait.data.records import Prompt
from plait.recipes.evaluation_sets import Answering


@dataclass(frozen=True)
class HeldOut:
    """A set of held-out items: prompts to answer, or where the flow generates nothing, examples, pairs or labelled
    responses to measure."""

    label: str
    """Its metrics are `eval/LABEL/…`; empty: they are `eval/…`."""
    answering: Answering
    prompts: tuple[Prompt, ...] = ()
    given: Mapping[str, tuple[Given, ...]] = field(default_factory=dict)
    """By what the flow reads."""

    @property
    def num_items(self) -> int:
        """Prompts, examples, or pairs."""
        samples = next(iter(self.given.values()), ())
        return len(self.prompts) or len({given.sample.prompt.uid for given in samples})

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of its prompts."""
        return tuple(self.prompts[0].columns) if self.prompts else ()

    @property
    def title(self) -> str:
        """For messages."""
        return f"evaluation set `{self.label}`" if self.label else "the held-out items"


def num_items(sets: Sequence[HeldOut]) -> dict[str, int]:
    """Label of each set → how many items it has."""
    return {held_out.label: held_out.num_items for held_out in sets}
