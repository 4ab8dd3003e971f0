"""What is sent from rank to rank: a message has a largest size."""

from __future__ import annotations

import numpy as np
import pytest

from plait.errors import RunError
from plait.workers import transport
from plait.workers.messages import Message


def test_a_message_that_is_too_large_is_refused_by_who_sends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "LARGEST_BYTES", 100)
    with pytest.raises(RunError, match=r"score to rank 1 has .* GiB, .*; lower `prompts_per_step`"):
        transport.Transport(None, 0, ()).send(1, Message({}, (np.zeros(13),)), "score")
