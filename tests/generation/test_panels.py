"""Where packed weights lie."""

from __future__ import annotations

import pytest
import torch

from plait.generation import panels
from plait.generation.panels import ALIGNMENT, HUGE_PAGE, aligned

NO_ADVICE = 10**6
"""What no kernel knows, as one that is built without huge pages does not know MADV_HUGEPAGE."""


@pytest.mark.parametrize("advice", [None, NO_ADVICE])
def test_large_weights_lie_at_a_huge_page_whether_there_are_such_or_not(
    monkeypatch: pytest.MonkeyPatch, advice: int | None
) -> None:
    if advice is not None:
        monkeypatch.setattr(panels.mmap, "MADV_HUGEPAGE", advice)
    memory = aligned((2, HUGE_PAGE), torch.float32)
    assert (memory.shape, memory.data_ptr() % HUGE_PAGE) == ((2, HUGE_PAGE), 0)
    assert not memory.any()
    memory.fill_(1.0)
    assert aligned((3, 5), torch.bfloat16).data_ptr() % ALIGNMENT == 0
