"""The pool's memory: how many tokens a budget holds, and that what is taken stays where it is."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from plait.cost.generation_memory import kv_bytes_per_token, pool_tokens
from plait.errors import ConfigError
from plait.generation import pool as pool_module
from plait.generation.engine import Engine, drain
from plait.generation.pool import KVPool, Places
from plait.generation.sampling import Sampling
from plait.generation.settings import GPU_SHARE, SamplingSettings
from tests.generation.test_engine import request_of
from tests.models.tiny import tiny_model

TOKEN = 1_000
"""Bytes of the keys and values of one token."""


def tokens(device: str = "cpu", memory: int | None = 64_000_000, **keys: Any) -> int | None:
    settings = SamplingSettings(**{"max_running": 4} | keys).sized(1_600, TOKEN, device, lambda: memory)
    assert settings.kv_memory is None
    return settings.kv_tokens


def test_a_share_and_bytes_become_whole_blocks() -> None:
    assert tokens(kv_memory=0.05) == 3_200_000 // 16_000 * 16 == 3_200
    assert tokens(kv_memory=2e6) == 2_000_000 // 16_000 * 16 == 2_000
    assert tokens(kv_memory=2_015_999) == 2_000


def test_no_more_than_can_ever_be_held() -> None:
    assert tokens() == tokens(kv_memory=0.9) == tokens(kv_memory=6e12) == 4 * 1_600


def test_a_gpu_has_a_budget_unless_one_is_given() -> None:
    assert tokens("cuda", 10_000_000) == int(GPU_SHARE * 10_000_000) // 16_000 * 16
    assert tokens("cuda", 10_000_000, kv_tokens=6_000) == 6_000
    assert tokens("cuda", 10_000_000, kv_memory=0.5) == 5_000_000 // 16_000 * 16
    assert tokens("cuda", None) == 4 * 1_600, "a GPU that is not here bounds nothing"
    assert tokens("cuda", None, kv_memory=2e6) == 2_000


@pytest.mark.parametrize(
    ("device", "stated", "running"),
    [
        ("cpu", {}, 64),
        ("cuda", {}, 256),
        ("cuda", {"kv_tokens": 640}, 256),
        ("cuda", {"max_running": 64}, 64),
        ("cuda", {"max_running": 7, "kv_tokens": 640}, 7),
        ("cpu", {"max_running": 300}, 300),
    ],
)
def test_a_gpu_runs_more_samples_unless_told_otherwise(device: str, stated: dict[str, int], running: int) -> None:
    """The pool is for so many, where nothing bounds it; and what is decided once stays."""
    sized = SamplingSettings(**stated).sized(100, TOKEN, device, lambda: None)
    assert (sized.max_running, sized.kv_tokens) == (running, stated.get("kv_tokens", running * 112))
    assert sized.sized(100, TOKEN, "cuda", lambda: None) == sized
    assert sized.limits(100).max_running == running


@pytest.mark.parametrize("value", [0, -0.1, 1, 1.5, 1_000, 2**20 - 1, 3_000_000.5])
def test_what_is_neither_a_share_nor_bytes_is_refused(value: float) -> None:
    with pytest.raises(
        ValidationError, match="a share of the device's memory between 0 and 1, or bytes from 1,048,576"
    ):
        SamplingSettings(kv_memory=value)


def test_two_sizes_of_one_pool_are_refused() -> None:
    with pytest.raises(ValidationError, match="kv_tokens and kv_memory both say how large"):
        SamplingSettings(kv_memory=0.5, kv_tokens=64)


def test_a_budget_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0\.01, 100000 bytes, but one block of 16 tokens takes 160000; give more"):
        SamplingSettings(kv_memory=0.01).sized(256, 10_000, "cpu", lambda: 10_000_000)


def test_an_engine_takes_tokens() -> None:
    with pytest.raises(ConfigError, match=r"kv_memory.*takes `kv_tokens`.*sized"):
        Engine(tiny_model("llama"), SamplingSettings(kv_memory=0.1))


def test_a_pool_of_a_gpu_is_forecast_whole() -> None:
    assert pool_tokens(1_000, 5_000, "cuda") == 5_000
    assert pool_tokens(1_000, 5_000, "cpu") == 1_000
    assert pool_tokens(1_000, 640, "cpu") == 640


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_addresses_stay_until_all_is_given_back(device: str) -> None:
    pool, like = KVPool(), torch.zeros(2, 3, 8, device=device)
    pool.reserve(1, 20)
    first = pool.layer(0, like, like)
    assert pool.spare == 20
    pool.reserve(2, 20)
    pool.layer(1, like, like)
    at = pool.addresses()
    pool.reserve(20, 20)
    assert pool.layer(0, like, like).key is first.key
    assert pool.addresses() == at
    assert first.key.shape == (21, 2, 16, 8)
    pool.clear()
    assert pool.spare is None


def test_layers_that_found_no_addresses_grow_beside_those_that_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses for three of four tensors, as where `ulimit -v` leaves some: what lies in all of them stays."""
    left = ["none", *[mmap.mmap] * 3]

    def mapped(*given: Any, **options: Any) -> Any:
        if (take := left.pop()) == "none":
            raise OSError("Cannot allocate memory")
        return take(*given, **options)

    monkeypatch.setattr(mmap, "mmap", mapped)
    pool, ones = KVPool(), torch.ones(2, 3, 8)
    pool.reserve(1, 20)
    for layer in range(2):
        pool.write(layer, Places(torch.tensor([0, 7, 15]), 16), ones, 2 * ones)
    block_bytes = 2 * 16 * 8 * 4
    assert (pool.spare, pool.num_bytes) == (None, 4 * block_bytes)
    at = pool.addresses()
    pool.reserve(20, 20)
    assert pool.addresses()[:3] == at[:3]
    assert pool.num_bytes == 4 * 20 * block_bytes
    for kv in pool.layers.values():
        assert (float(kv.key.sum()), float(kv.value.sum())) == (2 * 3 * 8, 2 * 2 * 3 * 8)


def test_a_pool_that_stays_holds_zeros_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lay there need not be finite, and a masked place enters a product with weight 0."""
    monkeypatch.setattr(pool_module, "takes_pages", lambda device: False)
    pool, one = KVPool(), torch.full((2, 3, 8), float("nan"))
    pool.reserve(1, 20)
    pool.write(
        0, Places(torch.tensor([0, 15, 20 * 16]), 16), one, one
    )  # in the block that was given out, and the spare one
    kept, at = pool.layers[0], pool.addresses()
    assert kept.key.isnan().any(dim=-1).sum() == 2 * 3
    pool.clear(keep_memory=True)
    assert (pool.num_blocks, pool.addresses(), pool.layers[0]) == (0, at, kept)
    assert not kept.key.any()
    assert not kept.value.any()


def test_memory_is_taken_at_once_where_there_are_no_pages() -> None:
    like = torch.zeros(2, 3, 8, device="meta")
    pool = KVPool()
    pool.reserve(1, 20)
    pool.layer(0, like, like)
    assert pool.num_bytes == 2 * 21 * 2 * 16 * 8 * 4
    by_page, of_cpu = KVPool(), torch.zeros(2, 3, 8)
    by_page.reserve(1, 20)
    by_page.layer(0, of_cpu, of_cpu)
    assert by_page.num_bytes == 2 * 1 * 2 * 16 * 8 * 4


def test_a_small_budget_changes_no_sample() -> None:
    model = tiny_model("llama")
    width = {torch.float64: "float64"}[model.dtype]
    shape = type("Shape", (), {"attending": 2, "kv_heads": 2, "head_dim": 8})
    each = kv_bytes_per_token(shape, width)
    said = []
    for budget in (None, 96 * each):
        settings = SamplingSettings(max_running=6)
        if budget is not None:
            tight = settings.model_copy(update={"kv_memory": budget})
            settings = tight.sized(model.max_positions, each, "cpu", lambda: None)
            assert settings.kv_tokens == 96
        engine = Engine(model, settings)
        for uid in range(3):
            engine.add(request_of(uid, num_samples=2, sampling=Sampling(max_tokens=20)))
        said.append(sorted((sample.uid, sample.token_ids) for sample in drain(engine)))
    assert said[0] == said[1]
