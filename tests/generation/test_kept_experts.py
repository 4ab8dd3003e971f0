"""What an engine keeps of where tokens went is what a forward of the whole text has chosen, however it was computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plait.cost.generation_memory import routed_bytes_per_token
from plait.data.packed import pack
from plait.data.records import Prompt, Sample
from plait.generation.engine import Engine, drain
from plait.generation.moves import SampleMoves
from plait.generation.request import GoingOn, Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.models.language_model import LanguageModel
from plait.models.shape import ModelShape, config_fields
from tests.cases import slow_but
from tests.models.tiny import tiny_model

PROMPTS = [tuple(range(5, 5 + length)) for length in (40, 43, 21)]
"""They begin alike, by whole blocks and by parts of one."""
LONGEST = 14


def engine_of(model: LanguageModel, **settings: Any) -> Engine:
    return Engine(model, SamplingSettings(router_replay=True, max_response_tokens=LONGEST, **settings))


def request(uid: int, samples: int = 3, **given: Any) -> Request:
    sampling = Sampling(max_tokens=LONGEST, keeps_experts=True, stop_token_ids=tuple(range(3, 300, 17)))
    return Request(Prompt(uid, "", PROMPTS[uid]), samples, sampling, NoiseKey(1, 2), **given)


def expected(model: LanguageModel, sample: Sample) -> np.ndarray:
    """[tokens but the last, layers, 2], each pair ascending."""
    layers: dict[int, Tensor] = {}

    class Heard:
        def chosen(self, layer: int, own_TK: Tensor) -> Tensor:
            layers[layer] = own_TK
            return own_TK

    with torch.no_grad():
        model.stage(pack([(sample.prompt.token_ids, [sample.all_ids])]), routing=Heard())
    return np.sort(torch.stack([own for _, own in sorted(layers.items())], 1)[:-1].numpy())


def assert_kept(model: LanguageModel, samples: Iterable[Sample], dtype: Any = np.uint8) -> None:
    for sample in samples:
        assert sample.experts is not None
        theirs = expected(model, sample)
        kept = [np.frombuffer(part, dtype) for part in (sample.experts.prompt, sample.experts.response)]
        assert len(kept[0]) == len(sample.prompt.token_ids) * theirs[0].size
        assert (np.sort(np.concatenate(kept).reshape(theirs.shape)) == theirs).all()


SETTINGS: list[dict[str, Any]] = [
    {"kv_tokens": 80},
    {"prefix_cache_tokens": 512, "max_prefill_tokens": 16},
    {"speculation": 3},
    {},
    {"exact": True},
    {"exact": True, "speculation": 2, "kv_tokens": 80},
]
FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"]


@pytest.mark.parametrize("settings", slow_but(SETTINGS[:3], SETTINGS), ids=str)
def test_however_a_text_is_computed(settings: dict[str, Any]) -> None:
    """In chunks, preempted and computed again, with blocks that others have computed, behind drafts."""
    model = tiny_model("qwen3_moe")
    engine = engine_of(model, **settings)
    for uid in range(len(PROMPTS)):
        engine.add(request(uid))
    first = list(drain(engine))
    assert_kept(model, first)
    assert len(first) == 9
    engine.add(request(0))  # of a cache, where there is one
    assert_kept(model, drain(engine))


@pytest.mark.parametrize("family", slow_but(["deepseek_v3"], FAMILIES))
def test_families(family: str) -> None:
    """Layers without a mixture, without keys and values, with a router that scores by sigmoids."""
    model = tiny_model(family)
    engine = engine_of(model)
    engine.add(request(2))
    assert_kept(model, drain(engine))


def test_more_experts_than_a_byte_counts() -> None:
    model = tiny_model("qwen3_moe", num_local_experts=300)
    engine = engine_of(model)
    engine.add(request(2))
    samples = list(drain(engine))
    assert_kept(model, samples, np.uint16)
    assert max(np.frombuffer(sample.experts.prompt, np.uint16).max() for sample in samples) > 255


DTYPES = [torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", slow_but(DTYPES[:1], DTYPES), ids=str)
def test_samples_that_move_bring_theirs(dtype: torch.dtype) -> None:
    """As bits among keys and values: in bfloat16 300 is no number. Nothing is computed again in the other engine."""
    model = tiny_model("qwen3_moe", dtype=dtype, num_local_experts=300)
    here, there = engine_of(model, exact=True), engine_of(model, exact=True)
    here.add(request(0))
    ended = [sample for _ in range(6) for sample in here.step()]
    moves, arrivals = SampleMoves(here.state), SampleMoves(there.state)
    moved = list(moves.started)
    assert moved
    for uid, index in moved:
        bulk = moves.export_sample(uid, index, final=False)
        rest = moves.export_sample(uid, index, since=bulk.stop)
        arrivals.import_sample(bulk, rest)
    samples = [*ended, *drain(here), *drain(there)]
    alone = engine_of(model, exact=True)
    alone.add(request(0))
    theirs = {sample.index: sample for sample in drain(alone)}
    assert {sample.index: sample.experts for sample in samples} == {
        index: sample.experts for index, sample in theirs.items()
    }


@pytest.mark.parametrize("parks", [True, False])
def test_samples_that_stood_still(parks: bool) -> None:
    """Parked ones bring theirs, others are computed again; what goes on beside is no matter."""
    model = tiny_model("qwen3_moe")
    engine = engine_of(model)
    engine.add(request(1))
    for _ in range(4):
        engine.step()
    halted = engine.halt(parks=parks)
    begun = tuple(sample for sample in halted if sample.token_ids)
    assert begun
    assert all(sample.experts is None for sample in begun), "they go on"
    left_out = frozenset(range(3)) - {sample.index for sample in begun}
    keeps = frozenset(sample.index for sample in begun) if parks else frozenset()
    engine.add(request(1, going_on=GoingOn(begun, left_out, {}, keeps)))
    assert_kept(model, drain(engine))


def test_new_weights() -> None:
    """What is computed again went where the new routers send it; what is kept, where the old ones did."""
    for kv, computed in (("recompute", True), ("keep", False)):
        model = tiny_model("qwen3_moe")
        engine = engine_of(model)
        engine.add(request(0, 1))
        for _ in range(4):
            engine.step()
        [response] = engine.state.flight.started.values()
        count = len(response.tokens) - 1
        old = expected(model, response.sample(model.tokenizer, reason=None if response.finish_reason else "open"))
        with torch.no_grad():
            for layer in model.module.model.layers:
                layer.mlp.gate.weight.neg_()
        engine.update_weights(1, kv)
        [sample] = drain(engine)
        kept = np.sort(np.frombuffer(sample.experts.prompt + sample.experts.response, np.uint8).reshape(-1, 2, 2))
        if computed:
            assert (kept == expected(model, sample)).all()
        else:
            assert (kept[:count] == old[:count]).all()
            assert (kept[:count] != expected(model, sample)[:count]).mean() > 0.5


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_forecasts_count_them_in_a_pool(family: str) -> None:
    """Of the layers that are mixtures: in the second family not the first."""
    model = tiny_model(family)
    engine = engine_of(model)
    engine.add(request(2))
    engine.step()
    shape, pool = ModelShape.from_config(config_fields(model.config)), engine.state.pool
    kept = {layer: blocks[0].nbytes // pool.block_tokens for layer, blocks in pool.experts.items()}
    assert kept == {layer: routed_bytes_per_token(shape, layer, layer + 1) for layer in kept}
    assert sum(kept.values()) == routed_bytes_per_token(shape, 0, shape.layers)


def test_who_does_not_ask_has_none() -> None:
    model = tiny_model("qwen3_moe")
    engine = Engine(model, SamplingSettings())
    engine.add(Request(Prompt(0, "", PROMPTS[0]), 2, Sampling(max_tokens=4), NoiseKey(1, 2)))
    assert all(sample.experts is None for sample in drain(engine))
    assert not engine.state.pool.experts
