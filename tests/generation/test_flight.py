"""Samples that leave an engine before they have ended."""

from __future__ import annotations

import torch

from plait.data.records import Prompt
from plait.generation.flight import InFlight
from plait.generation.request import Request
from plait.generation.response import PendingPrompt
from plait.generation.sampling import Sampling
from plait.kernels.noise import NoiseKey
from plait.policy.step import Start


def flight_of(*uids: int) -> InFlight:
    """Three samples of each prompt wait."""
    flight = InFlight((2,), policy_version=4)
    for uid in uids:
        request = Request(Prompt(uid, "", (5, 6)), 3, Sampling(), NoiseKey(1))
        flight.pending[uid] = PendingPrompt(request, (9,) * 3, 3, torch.zeros(8), 4)
    return flight


def test_samples_of_all_prompts_leave_in_one_pass() -> None:
    """Prompt by prompt, of each those that have begun before the others; who waits is looked at once."""
    flight = flight_of(7, 8, 9)
    flight.begin([Start(8, (1,))])
    waiting = ((uid, index) for uid in (9, 8, 7) for index in range(3) if (uid, index) != (8, 1))
    out = flight.take_out((7, 8), None, waiting)
    assert [response.key for response in out] == [(7, 0), (7, 1), (7, 2), (8, 1), (8, 0), (8, 2)]
    assert (list(flight.pending), flight.started) == ([9], {})


def test_one_sample_leaves_and_the_others_of_its_prompt_stay() -> None:
    flight = flight_of(7)
    [response] = flight.take_out((7,), 2, [(7, 0), (7, 1), (7, 2)])
    assert (response.key, flight.pending[7].num_pending) == ((7, 2), 2)
    assert flight.take_out((7,), 5, [(7, 0), (7, 1)]) == []
