"""The engine as users run it: preempted to the same bits, prefixes that only look alike, a machine without numba."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plait.data.records import Prompt, Sample
from plait.generation.compiled_forward import CompiledForward
from plait.generation.engine import Engine, drain
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels import paged_attention
from plait.kernels.decoder import CHUNK_ROWS
from plait.kernels.noise import NoiseKey
from tests.generation.requests import is_packed, with_head
from tests.generation.test_engine import TEXTS, by_uid, request_of
from tests.models.tiny import tiny_model

DTYPES = [torch.float32, torch.bfloat16]
needs_vectors = pytest.mark.skipif(not all(map(paged_attention.fast, DTYPES)), reason="no numba, or a CPU without AVX2")
FREE = Sampling(max_tokens=30, stop_token_ids=())


@needs_vectors
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_preempted_sample_is_computed_again_to_the_same_bits(dtype: torch.dtype) -> None:
    """The compiled forward gives a token the same bits in a chunk and alone, so the pool's size changes nothing."""
    model = tiny_model("llama", dtype=dtype)
    found: list[dict[str, Sample]] = []
    for kv_tokens, max_running in ((None, 8), (96, 8), (64, 3)):
        engine = Engine(model, SamplingSettings(kv_tokens=kv_tokens, max_running=max_running, max_prefill_tokens=7))
        for uid in range(3):
            engine.add(request_of(uid, TEXTS[uid], 3, FREE, lengths=(30, 17, 24)))
        samples, num_preempted = [], 0
        while engine.has_work:
            samples += engine.step()
            assert engine.last_step is not None
            num_preempted += engine.last_step.num_preempted
            assert isinstance(engine.state.forward.backends[0], CompiledForward)
            assert is_packed(engine) or not engine.has_work
        assert (num_preempted > 0) == (kv_tokens is not None)
        found.append(by_uid(samples))
    assert len(found[0]) == 9
    assert found[1] == found[2] == found[0]


@needs_vectors
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_who_reads_what_another_computes_in_the_step_stands_behind_it(dtype: torch.dtype) -> None:
    """Six prompts of 60 tokens, more rows than pass the layers at a time, and behind the last a prompt of which all
    but 12 tokens are those of that one; then all is computed again, of whole groups. Each sample says what it says
    alone."""
    model, heads = tiny_model("llama", dtype=dtype), [*range(6), 5]
    asked = [with_head(uid, 60, [20, 24], head) for uid, head in enumerate(heads)]
    expected = {}
    for request in asked:
        alone = Engine(model, SamplingSettings())
        alone.add(request)
        expected |= by_uid(drain(alone))
    engine = Engine(model, SamplingSettings())
    for request in asked:
        engine.add(request)
    engine.step()
    assert engine.last_step is not None
    assert engine.last_step.num_prefill_tokens == 6 * 60 + 12 > CHUNK_ROWS
    engine.update_weights(0)
    engine.step()
    assert engine.last_step.num_prefill_tokens == 6 * 61 + 8 * 13
    assert is_packed(engine)
    assert by_uid(drain(engine)) == expected


def test_a_prefix_is_all_that_stands_before() -> None:
    """Blocks of equal tokens behind other tokens are other keys: the last prompt begins like one and goes on like
    another of those that are kept."""
    first, second, third, last = ([seed + 7 * at % 250 for at in range(16)] for seed in (10, 20, 30, 40))
    prompts = [first + second + [9], third + last + [9], third + second + [9]]
    model = tiny_model("llama", dtype=torch.float64)
    engine = Engine(model, SamplingSettings(prefix_cache_tokens=160))
    for uid, token_ids in enumerate(prompts):
        request = Request(Prompt(uid, "", tuple(token_ids)), 1, FREE, NoiseKey(5))
        engine.add(request)
        engine.step()
        assert engine.last_step is not None
        assert engine.last_step.num_prefill_tokens == (17 if uid == 2 else 33), "the first block alone is shared"
        (found,) = drain(engine)
        alone = Engine(model, SamplingSettings())
        alone.add(request)
        (wanted,) = drain(alone)
        assert found.token_ids == wanted.token_ids
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)  # the family narrows to float32 inside


WITHOUT_NUMBA = """
    import sys

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("numba", "llvmlite"):
                raise ImportError(f"{name} is not installed")

    sys.meta_path.insert(0, Missing())
    import json
    import torch
    from tests.generation.test_fast_path import said

    print(json.dumps([said(torch.float64), said(torch.float32), said(torch.bfloat16)]))
    assert "numba" not in sys.modules
"""


def said(dtype: torch.dtype) -> list[list[int]]:
    """Twelve tokens of six samples in a pool that preempts."""
    engine = Engine(tiny_model("llama", dtype=dtype), SamplingSettings(max_running=4, kv_tokens=80))
    for uid in range(3):
        engine.add(request_of(uid, TEXTS[uid], 2, replace(FREE, max_tokens=12)))
    samples = by_uid(drain(engine))
    return [list(samples[uid].token_ids) for uid in sorted(samples)]


@pytest.mark.skipif(not paged_attention.AVAILABLE, reason="numba is not installed")
def test_without_numba_the_same_is_said() -> None:
    """In a process that has none: torch's own products compute, with the same noise."""
    command, root = [sys.executable, "-c", textwrap.dedent(WITHOUT_NUMBA)], Path(__file__).parents[2]
    out = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert out.returncode == 0, out.stderr
    wide, narrow, half = json.loads(out.stdout.splitlines()[-1])
    assert wide == said(torch.float64)
    assert narrow == said(torch.float32)
    assert [len(tokens) for tokens in half] == [12] * 6
