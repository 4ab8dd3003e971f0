"""Exact mode: log-probs and tokens equal to the bit, whatever is computed beside, in chunks, again, or elsewhere."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from plait.data.records import Sample
from plait.errors import ConfigError
from plait.generation.engine import Engine, drain
from plait.generation.exact import ExactForward
from plait.generation.pool import KVPool
from plait.generation.ragged import NewTokens
from plait.generation.request import GoingOn
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.models.language_model import LanguageModel
from tests.cases import examples, slow_but
from tests.generation.requests import with_head
from tests.generation.test_engine import TEXTS, by_uid, request_of
from tests.generation.test_ragged import random_tree
from tests.models.tiny import tiny_model

WIDE = {"hidden_size": 96, "intermediate_size": 200, "head_dim": 24}
"""Sizes that are no multiple of a vector's, so that remainders are computed."""
FAMILIES = {"llama": WIDE, "gemma2": {}, "gpt_oss": {}, "deepseek_v3": {}, "qwen3_moe": {}, "qwen3_5_text": {}}


@functools.cache
def model_of(family: str, dtype: torch.dtype) -> LanguageModel:
    return tiny_model(family, dtype=dtype, weight_scale=0.1, **FAMILIES[family])


def exact_engine(model: LanguageModel, **changes: object) -> Engine:
    return Engine(model, SamplingSettings(exact=True, **{"max_running": 64, **changes}))  # type: ignore[arg-type]


SAMPLING = Sampling(max_tokens=8, stop_token_ids=(), temperature=0.9)


@functools.cache
def alone(family: str, dtype: torch.dtype, uid: int) -> dict[str, Sample]:
    """The two samples of a prompt, one after the other, by an engine of their own."""
    engine = exact_engine(model_of(family, dtype), max_running=1)
    engine.add(request_of(uid, TEXTS[uid], 2, SAMPLING))
    return by_uid(drain(engine))


NARROW = (torch.float32, torch.bfloat16)
EVERY = [*itertools.product(FAMILIES, NARROW), ("llama", torch.float64)]
QUICK = {
    "company": [("llama", torch.bfloat16), ("qwen3_5_text", torch.float32)],
    "beginnings": [("llama", torch.float64), ("deepseek_v3", torch.bfloat16)],
}
"""Together every width of numbers and attention of every kind: a family has layers of its own in all widths alike, and
both tests the same ways to compute."""


@pytest.mark.parametrize(("family", "dtype"), slow_but(QUICK["company"], EVERY), ids=str)
@settings(max_examples=examples(2, 6), deadline=None, phases=[Phase.generate])
@given(
    order=st.permutations(range(len(TEXTS))),
    taken=st.integers(2, 3),
    max_running=st.sampled_from([3, 7, 50]),
    max_prefill_tokens=st.sampled_from([5, 1000]),
    kv_tokens=st.sampled_from([None, 64]),
    cache=st.sampled_from([0, 64]),
)
def test_the_same_bits_in_any_company(
    family, dtype, order, taken, max_running, max_prefill_tokens, kv_tokens, cache
) -> None:
    engine = exact_engine(
        model_of(family, dtype),
        max_running=max_running,
        max_prefill_tokens=max_prefill_tokens,
        kv_tokens=kv_tokens,
        prefix_cache_tokens=cache,
    )
    expected: dict[str, Sample] = {}
    for uid in order[:taken]:
        engine.add(request_of(uid, TEXTS[uid], 2, SAMPLING))
        expected |= alone(family, dtype, uid)
    assert by_uid(drain(engine)) == expected
    assert len(expected) == 2 * taken


@functools.cache
def alone_with_head(family: str, dtype: torch.dtype, uid: int, size: int, head: int) -> dict[str, Sample]:
    """The two samples of a prompt, each by an engine of its own: nothing is shared."""
    found = {}
    for index in range(2):
        engine = exact_engine(model_of(family, dtype))
        engine.add(replace(with_head(uid, size, [5, 8], head), going_on=GoingOn(left_out=frozenset({1 - index}))))
        found |= by_uid(drain(engine))
    return found


@pytest.mark.parametrize(("family", "dtype"), slow_but(QUICK["beginnings"], EVERY), ids=str)
@settings(max_examples=examples(2, 6), deadline=None, phases=[Phase.generate])
@given(
    asked=st.lists(st.tuples(st.sampled_from([17, 31, 33]), st.integers(0, 1)), min_size=2, max_size=4),
    steps=st.integers(0, 3),
    max_running=st.sampled_from([3, 50]),
    max_prefill_tokens=st.sampled_from([20, 1000]),
    kv_tokens=st.sampled_from([None, 64]),
)
def test_the_same_bits_where_prompts_begin_alike(
    family, dtype, asked, steps, max_running, max_prefill_tokens, kv_tokens
) -> None:
    """Prompts come one after the other, in chunks or at once, and samples give way in a pool that has no room for all
    of them: whoever computed what they begin with, tokens, log-probs and ends are those of each alone."""
    engine = exact_engine(
        model_of(family, dtype), max_running=max_running, max_prefill_tokens=max_prefill_tokens, kv_tokens=kv_tokens
    )
    expected, samples = {}, []
    for uid, (size, head) in enumerate(asked):
        engine.add(with_head(uid, size, [5, 8], head))
        expected |= alone_with_head(family, dtype, uid, size, head)
        for _ in range(steps):
            samples += engine.step() if engine.has_work else []
    assert by_uid([*samples, *drain(engine)]) == expected
    assert engine.state.scheduler.blocks.num_held == 0


@pytest.mark.parametrize(
    ("family", "dtype"),
    slow_but([("llama", torch.bfloat16)], itertools.product(("llama", "gemma2", "deepseek_v3"), NARROW)),
    ids=str,
)
def test_drafts_in_trees_give_the_bits_of_plain_decoding(family: str, dtype: torch.dtype) -> None:
    """Each node of a tree has the logits that its path would have, token by token, in another pool."""
    model = model_of(family, dtype)
    rng = random.Random(3)
    prompt = [rng.randrange(5, 300) for _ in range(21)]
    pool = KVPool()
    pool.reserve(8, 8)
    forward = ExactForward(model, pool)
    with torch.no_grad():
        forward.logits([NewTokens(prompt, 0, [5, 2])], [0])
        for count in (1, 4, 7):
            tree = random_tree(count, rng)
            tokens = [rng.randrange(5, 300) for _ in range(count)]
            rows = forward.logits([NewTokens(tokens, len(prompt), [5, 2], tree)], [count])
            assert rows is not None
            for node in range(count):
                path = [tokens[i] for i in tree[node].nonzero()[:, 0].tolist()]
                fresh = KVPool()
                fresh.reserve(3, 3)
                plain = ExactForward(model, fresh)
                plain.logits([NewTokens(prompt[:9], 0, [1, 0, 2])], [0])
                plain.logits([NewTokens(prompt[9:], 9, [1, 0, 2])], [0])
                for i, token in enumerate(path):
                    wanted = plain.logits([NewTokens([token], len(prompt) + i, [1, 0, 2])], [1])
                assert wanted is not None
                assert torch.equal(rows[node], wanted[0])


def test_exact_mode_is_for_the_cpu() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    model.weights = model.weights.to("meta")
    with pytest.raises(ConfigError, match=r"sampling\.exact.*found meta"):
        exact_engine(model)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_exact_mode_says_what_fast_mode_says(family: str) -> None:
    model = model_of(family, torch.float64)
    fast = Engine(model, SamplingSettings())
    for uid in range(3):
        fast.add(request_of(uid, TEXTS[uid], 2, SAMPLING))
    found = by_uid(drain(fast))
    for uid in range(3):
        for name, wanted in alone(family, torch.float64, uid).items():
            assert found[name].token_ids == wanted.token_ids
            assert found[name].logprobs == pytest.approx(wanted.logprobs, abs=1e-5)  # families narrow to float32 inside
