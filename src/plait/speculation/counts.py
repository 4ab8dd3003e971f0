"""How speculation went: counts that add up over steps, engines and ranks, and what they come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Self

import numpy as np

from plait.kernels.draft_lookup import NUM_SOURCES
from plait.speculation.pool import FloatArray, IntArray

MOST_PLACES = 15
"""Tokens of a draft at most."""
SOURCES = ("prompt", "siblings", "history", "model")
"""By their numbers in `draft_lookup`: its prompt and its own words, other samples of the prompt, earlier ones; a draft
model."""


def _zeros_of_places() -> FloatArray:
    return np.zeros(MOST_PLACES)


def _zeros_of_sources() -> FloatArray:
    return np.zeros(NUM_SOURCES)


@dataclass
class Counts:
    """What was counted in the steps so far; a *row* is a sample that computes its newest token in a step."""

    steps: float = 0.0
    """Those of nothing but running samples; rows and drafts are counted beside prompts, too."""
    steps_with_drafts: float = 0.0
    """Those of these that computed drafts."""
    rows: float = 0.0
    """Rows of the steps that computed drafts."""
    drafted: float = 0.0
    """Draft tokens that were computed."""
    accepted: float = 0.0
    """Draft tokens that were accepted, among those computed."""
    saved_s: float = 0.0
    """Seconds that plain steps would have taken longer for the same tokens, by the fitted cost of a step."""
    drafting_s: float = 0.0
    """Seconds of looking drafts up, of the draft model, and of choosing."""
    model_passes: float = 0.0
    """Forwards of the draft model, each of a token for all samples that it drafts for."""
    tried_at: FloatArray = field(default_factory=_zeros_of_places)
    """By position in the draft: computed draft tokens of which all before were accepted."""
    accepted_at: FloatArray = field(default_factory=_zeros_of_places)
    tried_of: FloatArray = field(default_factory=_zeros_of_sources)
    """By source: as `tried_at`."""
    accepted_of: FloatArray = field(default_factory=_zeros_of_sources)

    def computed(self, sources_X: IntArray, places_X: IntArray, hits_X: IntArray) -> None:
        """Draft tokens that were computed and of which all before were accepted: their sources, places, and whether
        they did."""
        self.accepted += float(hits_X.sum())
        self.tried_at += np.bincount(places_X, minlength=MOST_PLACES)
        self.accepted_at += np.bincount(places_X, hits_X, minlength=MOST_PLACES)
        self.tried_of += np.bincount(sources_X, minlength=NUM_SOURCES)
        self.accepted_of += np.bincount(sources_X, hits_X, minlength=NUM_SOURCES)

    def numbers(self) -> list[float]:
        """All of them in a row."""
        return [float(x) for count in fields(self) for x in np.atleast_1d(getattr(self, count.name))]

    @classmethod
    def of(cls, numbers: list[float]) -> Self:
        """The inverse of `numbers`."""
        left, made = list(numbers), cls()
        for count in fields(cls):
            value = getattr(made, count.name)
            if isinstance(value, np.ndarray):
                setattr(made, count.name, np.array([left.pop(0) for _ in value]))
            else:
                setattr(made, count.name, left.pop(0))
        assert not left, f"{len(left)} numbers too many"
        return made

    def __add__(self, other: Counts) -> Counts:
        return Counts.of([a + b for a, b in zip(self.numbers(), other.numbers(), strict=True)])

    def since(self, before: Counts) -> Counts:
        """What was counted since there were so many."""
        return Counts.of([a - b for a, b in zip(self.numbers(), before.numbers(), strict=True)])

    def figures(self) -> Mapping[str, float]:
        """What they come to; shares of nothing are left out."""
        figures = {
            "drafted_steps": _share(self.steps_with_drafts, self.steps),
            "mean_acceptance_length": _share(self.rows + self.accepted, self.rows),
            "draft_acceptance_rate": _share(self.accepted, self.drafted),
            "draft_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "saved_s": self.saved_s,
            "drafting_s": self.drafting_s,
            "draft_model_passes": _share(self.model_passes, self.steps) if self.model_passes else None,
        }
        tried = [
            (f"acceptance_at_{i + 1}", *pair)
            for i, pair in enumerate(zip(self.accepted_at, self.tried_at, strict=True))
        ]
        tried += [
            (f"acceptance_of_{n}", *pair) for n, *pair in zip(SOURCES, self.accepted_of, self.tried_of, strict=True)
        ]
        figures |= {name: _share(hits, trials) for name, hits, trials in tried}
        return {name: value for name, value in figures.items() if value is not None}


def _share(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None
