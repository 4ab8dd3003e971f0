"""The benchmarks of turns run: one counts what is computed of the turns before, one what waits for whom."""

from __future__ import annotations

import re

import pytest

from tests.benchmarks.scripts import output_of


@pytest.mark.slow
def test_it_runs() -> None:
    """Four prompts of 44 tokens, of which two blocks, 32 tokens, are common; two samples of each, which draw 3 turns of
    16 tokens with replies of 16. Behind a reply a sample has 76 tokens, then 108; of these 3 and 5 blocks are found, or
    the 2 of all prompts."""
    printed = output_of(
        *("turns.py", "--tiny", "--repeats", "1", "--dtype", "float32"),
        *("--samples", "2", "--turns", "3", "--tokens", "16", "--reply-tokens", "16"),
    )
    found = re.search(r"8 samples of 3 turns: computed (\d+) tokens in .* found, (\d+) in", printed)
    assert found is not None, printed
    first = 44 + 3 * 12
    kept = 8 * (76 - 48) + 8 * (108 - 80)
    again = 32 + 8 * (76 - 32) + 32 + 8 * (108 - 32)
    assert [int(number) for number in found.groups()] == [first + kept, first + again]


@pytest.mark.slow
def test_rounds_of_a_step_and_of_prompts_draw_the_same() -> None:
    printed = output_of(
        *("turn_rounds.py", "--tiny", "--repeats", "1", "--steps", "1", "--dtype", "float32", "--seconds", "0.01"),
        *("--prompts", "3", "--samples", "2", "--turns", "3", "--tokens", "60", "--workers", "2"),
    )
    assert "3 prompts x 2 samples of 3 turns" in printed
    assert re.search(r"turns wait for the step [\d.]+ s, for their prompt [\d.]+ s: [\d.]+x, the same tokens", printed)
