"""Keys and values of samples that stand still between two versions, by hand.

A SmolLM2-135M has 30 layers, three key heads of 64 numbers: in float32 46,080 bytes a token. Prompts have 128 tokens.
"""

from __future__ import annotations

from typing import Any

import pytest

from plait.cost.device_memory import PARKED, READING, memory_by_device, parked_bytes
from tests.cost.test_device_memory import facts_of, named

TOKEN = 2 * 30 * 3 * 64 * 4
AHEAD: dict[str, Any] = {
    "dtype": "float32",
    "max_staleness": 2,
    "prompts_per_step": 16,
    "samples_per_prompt": 4,
    "sampling": {"max_response_tokens": 100, "max_running": 24},
}


@pytest.mark.parametrize(
    ("devices", "keys", "tokens"),
    [
        (1, {"partial_rollout": "keep"}, 24 * 228),
        (4, {"partial_rollout": "keep"}, 16 * 228),  # of each of four instances, which runs all of its 16
        (1, {"partial_rollout": "keep", "tokens_per_version": 30}, 2 * 64 * (128 + 60)),
        (4, {"partial_rollout": "keep", "tokens_per_version": 70}, 2 * 16 * 228),
        (1, {"partial_rollout": "recompute"}, 0),
    ],
)
def test_it_is_of_all_that_may_stand_still(devices: int, keys: dict[str, Any], tokens: int) -> None:
    facts = facts_of(named("colocated", devices), "grpo", **AHEAD, **keys)
    assert parked_bytes(0, facts) == tokens * TOKEN


def test_ranks_of_an_instance_have_some_heads_each() -> None:
    facts = facts_of(named("colocated", 3, tp=3), "grpo", **AHEAD, partial_rollout="keep")
    assert [parked_bytes(rank, facts) for rank in range(3)] == [24 * 228 * TOKEN // 3] * 3


def test_a_cpu_has_it_from_the_first_rollout_on() -> None:
    plain, kept = (
        memory_by_device(facts_of(named("colocated", 1), "grpo", **AHEAD, partial_rollout=how))[0]
        for how in ("recompute", "keep")
    )
    parked = 24 * 228 * TOKEN
    assert dict(kept.rows)[PARKED] == parked
    assert not kept.host
    more = {call: count - dict(plain.during)[call] for call, count in kept.during}
    assert more.pop(READING) == 0
    assert set(more.values()) == {parked}


def test_a_gpu_has_it_on_its_host() -> None:
    gpu = {**AHEAD, "device": "cuda", "partial_rollout": "keep"}
    (device,) = memory_by_device(facts_of(named("colocated", 1), "grpo", **gpu))
    assert device.host == [(PARKED, 24 * 228 * TOKEN)]
    assert PARKED not in dict(device.rows)
