"""Slots under random traffic, and attention over them, against dense attention of each sample alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.generation.attention import DecodeContext
from plait.generation.cache import KeyValue, SlotCache, owned
from plait.policy.batching import compaction

HEADS, KEY_HEADS, D, E = 6, 2, 4, 3


def attend_alone(
    query: torch.Tensor, kv: KeyValue, *, window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One sample's newest token over its own context, written out."""
    key = kv.key.repeat_interleave(HEADS // KEY_HEADS, dim=0).double()
    value = kv.value.repeat_interleave(HEADS // KEY_HEADS, dim=0).double()
    scores = torch.einsum("hd,hkd->hk", query.double(), key) * 0.4
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if window is not None:
        scores[:, : max(0, scores.shape[1] - window)] = -torch.inf
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
    return torch.einsum("hk,hke->he", scores.softmax(-1)[:, : key.shape[1]], value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks", "value_size"),
    [(None, None, False, D), (3, None, False, D), (None, 0.7, False, E), (2, None, True, D), (None, None, False, E)],
)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**31), max_slots=st.integers(1, 6))
def test_slots_hold_what_their_samples_saw(
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    value_size: int,
    seed: int,
    max_slots: int,
) -> None:
    """Samples start, take tokens and leave at random; growth and compaction happen on the way."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    sinks = draw(HEADS) if with_sinks else None
    cache = SlotCache(max_slots)
    truth: list[KeyValue] = []  # by slot
    for _ in range(25):
        count = min(below(3), max_slots - len(truth))
        if count:
            num_tokens = 1 + below(5)
            prompt = KeyValue(draw(KEY_HEADS, num_tokens, D), draw(KEY_HEADS, num_tokens, value_size))
            cache.reserve(len(truth) + count, num_tokens + 1, 100)
            cache.write_prompt(len(truth), count, owned({5: prompt}))
            truth += [prompt] * count
        if not truth:
            continue
        positions = [kv.key.shape[1] for kv in truth]
        cache.reserve(len(truth), max(positions) + 1, 100)
        context = DecodeContext(cache, positions, torch.tensor(positions))
        query, key = draw(HEADS, len(truth), D), draw(KEY_HEADS, len(truth), D)
        value = draw(KEY_HEADS, len(truth), value_size)
        out = context.attend(5, query, key, value, scale=0.4, window=window, softcap=softcap, sinks=sinks)
        for row, kv in enumerate(truth):
            at = slice(row, row + 1)
            truth[row] = KeyValue(torch.cat([kv.key, key[:, at]], 1), torch.cat([kv.value, value[:, at]], 1))
            expected = attend_alone(query[:, row], truth[row], window=window, softcap=softcap, sinks=sinks)
            torch.testing.assert_close(out[row].double(), expected, atol=tolerance, rtol=tolerance)
        leaving = [slot for slot in range(len(truth)) if below(4) == 0]
        moves = compaction(len(truth), leaving)
        if moves:
            cache.move(moves, max(truth[source].key.shape[1] for source, _ in moves))
        for source, target in moves:
            truth[target] = truth[source]
        del truth[len(truth) - len(leaving) :]


def test_memory_grows_by_doubling_and_is_given_back() -> None:
    cache = SlotCache(8)
    prompt = {layer: KeyValue(torch.ones(2, 3, 4), torch.ones(2, 3, 6)) for layer in range(3)}
    cache.reserve(3, 10, 100)
    cache.write_prompt(0, 3, prompt)
    assert cache.num_bytes == 3 * 3 * 2 * 10 * (4 + 6) * 4  # layers, slots, heads, places, sizes, float32
    cache.reserve(4, 11, 100)
    assert (cache.num_slots, cache.length) == (6, 20)
    assert cache.layers[1].key[2, :, :3].eq(1).all()
    assert cache.layers[1].key[2, :, 3:].eq(0).all()
    cache.reserve(7, 90, 95)
    assert (cache.num_slots, cache.length) == (8, 95)
    cache.clear()
    assert cache.num_bytes == 0
