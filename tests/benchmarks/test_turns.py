"""The benchmark of turns runs, and counts what is computed of the turns before."""

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
