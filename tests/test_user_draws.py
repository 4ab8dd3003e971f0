"""What the user's own code draws is a function of what it is called for, and leaves no trace."""

from __future__ import annotations

import random

import numpy as np
import torch

from plait.user_draws import drawing


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def test_what_is_drawn_goes_by_the_noise_and_leaves_the_process_as_it_was() -> None:
    with drawing("before"):
        drawn()
        with drawing("one"):
            one, then = drawn(), drawn()
        behind = drawn()
    with drawing("before"):
        drawn()
        assert drawn() == behind
    with drawing("another"):
        another = drawn()
    with drawing("one"):
        assert [drawn(), drawn()] == [one, then]
    assert len({*one, *then, *another, *behind}) == 12
