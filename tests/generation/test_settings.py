"""Values out of range are named by their key, before anything is loaded."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from plait.errors import ConfigError
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_k": -1}, r"top_k: expected at least 0 \(0 keeps all\), found -1"),
        ({"top_p": 0.0}, r"top_p: expected above 0 and at most 1, found 0\.0"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1, found 0"),
        ({"temperature": 1e-9}, r"temperature: expected 0 \(greedy\) or at least 0\.01, found 1e-09: so small"),
    ],
)
def test_a_sampling_parameter_out_of_range(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        Sampling(**values)


def test_less_than_a_block_of_cache_is_no_cache() -> None:
    with pytest.raises(ValidationError, match="expected 0 or at least 16, the tokens of a block, found 10"):
        SamplingSettings(prefix_cache_tokens=10)
    assert SamplingSettings(prefix_cache_tokens=0).limits(256).cache_blocks == 0
    assert SamplingSettings(prefix_cache_tokens=40).limits(256).cache_blocks == 2


@pytest.mark.parametrize(
    ("given", "found"), [*((word, word) for word in ("auto", "adaptive", "off")), (4, 4), ("4", 4), (15, 15)]
)
def test_what_speculation_may_be(given: object, found: object) -> None:
    assert SamplingSettings(speculation=given).speculation == found


@pytest.mark.parametrize("given", [0, 16, -1, "on", 2.0, None])
def test_what_it_may_not_be(given: object) -> None:
    with pytest.raises(ValidationError, match="expected auto, adaptive, off or a number of tokens from 1 to 15"):
        SamplingSettings(speculation=given)


def test_the_pool_is_of_whole_blocks() -> None:
    assert SamplingSettings(kv_tokens=40).num_blocks(256) == 2
    assert SamplingSettings(max_running=3).num_blocks(250) == 3 * 16
