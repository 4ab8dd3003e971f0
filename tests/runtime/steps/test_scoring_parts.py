"""Parts of a rollout that are looked for while its samples end."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from plait.data.records import FinishReason, Prompt, Sample
from plait.policy import score_parts
from plait.policy.score_parts import PartSize
from plait.runtime.steps import scoring_parts
from plait.runtime.steps.partial_rollout import PartialRollout
from plait.runtime.steps.scoring_parts import RolloutParts

PROMPTS, SAMPLES = 256, 4
COUNT = PROMPTS * SAMPLES


def test_parts_of_a_large_rollout_are_looked_for_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,024 samples, a thirty-second of those that are left ends between two looks, and at last one: some 140 looks.
    The parts are those that all samples make when all have ended."""
    looks = []

    def counted(*given) -> list:
        looks.append(given)
        return score_parts.settled(*given)

    monkeypatch.setattr(scoring_parts, "settled", counted)
    rng = random.Random(3)
    prompts = [Prompt(uid, "", (1,) * 4) for uid in range(PROMPTS)]
    samples = [
        Sample(prompt, index, (7,) * count, (-1.0,) * count, "", FinishReason.STOP)
        for prompt in prompts
        for index in range(SAMPLES)
        for count in [rng.randrange(1, 100)]
    ]

    def rollout() -> tuple[PartialRollout, RolloutParts]:
        growing = PartialRollout(prompts, SAMPLES)
        return growing, RolloutParts(growing, PartSize(600, falls=2), at_once=COUNT // 2)

    def taken(parts: RolloutParts) -> Iterator[tuple[str, ...]]:
        while (part := parts.take()) is not None:
            yield tuple(sample.uid for sample in part.rows.samples)

    growing, parts = rollout()
    found = []
    for sample in sorted(samples, key=lambda sample: len(sample.token_ids)):
        growing.take(sample)
        found += taken(parts)
    assert parts.left == 0
    assert 100 < len(looks) < 200
    growing, parts = rollout()
    for sample in samples:
        growing.take(sample)
    assert found == [*taken(parts)]
