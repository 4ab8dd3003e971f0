"""Random examples have no time limit: how long one takes says how busy the machine is. One thread, for tiny tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
