"""What docs/runs.md says of the keys of a resumed run."""

import re
from pathlib import Path

from plait.runtime.folder.claim import RESUMABLE_KEYS

PAGE = Path(__file__).parents[2] / "docs" / "runs.md"


def test_the_keys_that_a_resumed_run_may_change_are_those_of_the_page() -> None:
    (said,) = re.findall(r"### What a resumed run may change\n(.*?)Every other key", PAGE.read_text(), re.DOTALL)
    assert set(re.findall(r"`([\w.]+)`", said)) == RESUMABLE_KEYS
