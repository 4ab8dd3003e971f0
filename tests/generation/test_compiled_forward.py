"""The compiled forward against the Transformers module, and which models it refuses."""

from __future__ import annotations

import functools
from threading import Thread

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.packed import pack as packed_row
from plait.generation.compiled_forward import CompiledForward
from plait.generation.paged import attention_for
from plait.generation.panels import lay_out, panels_of
from plait.generation.pool import KVPool
from plait.generation.ragged import NewTokens, RaggedBatch, ragged
from plait.generation.ragged_context import RaggedContext
from plait.generation.refused import Refused
from plait.kernels import decoder, paged_attention, products
from plait.kernels.paged_attention import KEYS
from plait.models.compute.attention import PackedContext
from plait.models.language_model import LanguageModel
from tests.models.tiny import VOCAB_SIZE, shared_model, tiny_model

DTYPES = [torch.float32, torch.bfloat16]
needs_vectors = pytest.mark.skipif(not all(map(paged_attention.fast, DTYPES)), reason="no numba, or a CPU without AVX2")
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "smollm3", "granite", "gemma", "phi3"]


def compiled_of(model: LanguageModel) -> CompiledForward:
    return CompiledForward.of(model)


@functools.cache
def shared_compiled(family: str, dtype: torch.dtype) -> CompiledForward:
    return compiled_of(shared_model(family, dtype))


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def module_logits(model: LanguageModel, token_ids: list[int]) -> torch.Tensor:
    row = packed_row([(token_ids, ())])
    with torch.no_grad():
        return model.logits(model.hidden(row.token_ids_T, row.position_ids_T, PackedContext(row))).float()


def pool_of(num_blocks: int) -> KVPool:
    pool = KVPool(KEYS)
    pool.reserve(num_blocks, num_blocks)
    return pool


@needs_vectors
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_decode_steps_give_the_logits_of_the_module(family: str) -> None:
    model, compiled = shared_model(family, torch.float32), shared_compiled(family, torch.float32)
    token_ids = tokens(70)
    expected = module_logits(model, token_ids)
    pool, table, found, at = pool_of(6), [4, 0, 5, 1, 2], [], 0
    for count in (40, 1, 3, 1, 20, 1, 1, 3):
        batch = ragged([NewTokens(token_ids[at : at + count], at, table)], KEYS)
        found.append(compiled.logits(compiled.hidden(batch, pool)))
        at += count
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@needs_vectors
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_the_module_is(family: str) -> None:
    token_ids = tokens(40)
    narrow, compiled = shared_model(family, torch.bfloat16), shared_compiled(family, torch.bfloat16)
    wide = tiny_model(family, dtype=torch.bfloat16)
    wide.module.float()
    exact = wide.module(
        input_ids=torch.tensor([token_ids]), use_cache=False, context=PackedContext(packed_row([(token_ids, ())]))
    )
    exact = exact.logits[0].detach()
    batch = ragged([NewTokens(token_ids, 0, [2, 0, 1])], KEYS)
    found = compiled.logits(compiled.hidden(batch, pool_of(3))).float()
    ours, theirs = (
        (found - exact).square().mean().sqrt(),
        (module_logits(narrow, token_ids) - exact).square().mean().sqrt(),
    )
    assert ours <= 1.15 * theirs, f"root mean square error {ours:.3g}, of the module {theirs:.3g}"


@needs_vectors
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    family=st.sampled_from(["llama", "qwen3", "mistral"]),
    seed=st.integers(0, 99),
)
def test_logits_are_the_same_to_the_bit_in_every_batch_and_chunking(
    dtype: torch.dtype, lengths: list[int], family: str, seed: int
) -> None:
    compiled = shared_compiled(family, dtype)
    texts = [tokens(length, seed + index) for index, length in enumerate(lengths)]
    tables = [list(range(4 * index, 4 * index + 4)) for index in range(len(texts))]
    rank = sorted(range(len(texts)), key=lambda index: NewTokens(texts[index], 0, tables[index]).rank)
    together = ragged([NewTokens(texts[index], 0, tables[index]) for index in rank], KEYS)
    whole = compiled.logits(compiled.hidden(together, pool_of(4 * len(texts))))
    starts = dict(zip(rank, np.cumsum([0, *(len(texts[index]) for index in rank)]).tolist(), strict=False))
    for index, text in enumerate(texts):
        pool, at = pool_of(4), 0
        while at < len(text):
            count = min(1 + (seed + at) % 7, len(text) - at)
            batch = ragged([NewTokens(text[at : at + count], at, [3, 1, 0, 2])], KEYS)
            found = compiled.logits(compiled.hidden(batch, pool))
            assert torch.equal(found, whole[starts[index] + at : starts[index] + at + count])
            at += count


@needs_vectors
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tree_of_new_tokens_and_rows_that_are_read(dtype: torch.dtype) -> None:
    model, compiled = shared_model("llama", dtype), shared_compiled("llama", dtype)
    prompt, branch = tokens(20), tokens(5, seed=1)
    tree = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]).bool()
    pool = pool_of(4)
    compiled.hidden(ragged([NewTokens(prompt, 0, [0, 1])], KEYS), pool)
    batch = ragged([NewTokens(branch, 20, [0, 1], tree)], KEYS, read=[4, 0, 3])
    found = compiled.logits(compiled.hidden(batch, pool)).float()
    for row, path in enumerate(([0, 2, 4], [0], [0, 1, 3])):
        expected = module_logits(model, prompt + [branch[node] for node in path])[-1]
        bound = (1e-4 if dtype == torch.float32 else 0.06) * float(expected.abs().max())
        torch.testing.assert_close(found[row], expected, rtol=0, atol=bound)


@needs_vectors
def test_queries_that_grow_with_the_position_are_refused() -> None:
    """Ministral 3 multiplies them from token 16,384 on: by 1.07, which is near the rounding of bfloat16."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 1 << 14}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    options = {"max_position_embeddings": 1 << 18, "rope_parameters": rope}
    model = tiny_model("ministral3", dtype=torch.bfloat16, weight_scale=0.1, **options)
    with pytest.raises(Refused, match="its queries grow with the position"):
        compiled_of(model)


@needs_vectors
def test_more_rows_than_a_chunk_and_few_that_are_read() -> None:
    model, compiled = tiny_model("llama", dtype=torch.float32, max_position_embeddings=1024), None
    compiled = CompiledForward.of(model)
    token_ids = tokens(2 * decoder.CHUNK_ROWS + 9)
    table = list(range(40))
    expected = module_logits(model, token_ids)
    for read in ([0, 255, 256, 300, 519], [520]):
        batch = ragged([NewTokens(token_ids, 0, table)], KEYS, read=read)
        found = compiled.logits(compiled.hidden(batch, pool_of(40)))
        torch.testing.assert_close(found, expected[read], rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@needs_vectors
def test_its_keys_and_values_are_those_of_the_module() -> None:
    model, compiled = shared_model("qwen3", torch.float32), shared_compiled("qwen3", torch.float32)
    batch: RaggedBatch = ragged([NewTokens(tokens(20), 0, [1, 0])], KEYS)
    ours, theirs = pool_of(2), pool_of(2)
    compiled.hidden(batch, ours)
    with torch.no_grad():
        model.hidden(
            batch.token_ids_T,
            batch.position_ids_T,
            RaggedContext(theirs, batch, attention_for(model.device, model.dtype, theirs.block_tokens)),
        )
    for layer, expected in theirs.layers.items():
        torch.testing.assert_close(ours.layers[layer].key, expected.key, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.layers[layer].value, expected.value, rtol=1e-4, atol=1e-4)


@needs_vectors
def test_threads_share_the_work_and_change_no_bit() -> None:
    compiled = shared_compiled("llama", torch.bfloat16)
    samples = [NewTokens(tokens(count, count), 0, [2 * count, 2 * count + 1]) for count in (1, 2, 5)]
    batch = ragged(samples, KEYS)
    alone = compiled.logits(compiled.hidden(batch, pool_of(12)))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        shared = [compiled.logits(compiled.hidden(batch, pool_of(12))) for _ in range(3)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(logits, alone) for logits in shared)


@needs_vectors
def test_where_a_thread_cannot_begin_no_other_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three threads the last cannot, as in a container that may have no more of them."""
    compiled, batch = compiled_of(shared_model("llama", torch.bfloat16)), ragged([NewTokens([5, 6], 0, [0])], KEYS)
    alone = compiled.hidden(batch, pool_of(2))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    start, begun = Thread.start, []

    def starting(thread: Thread) -> None:
        begun.append(thread)
        if len(begun) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", starting)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            compiled.hidden(batch, pool_of(2))
    begun[0].join(20)
    assert not begun[0].is_alive(), "it waits for the others"
    assert torch.equal(compiled.hidden(batch, pool_of(2)), alone)


@needs_vectors
@pytest.mark.parametrize("keep_memory", [False, True])
def test_packed_weights_are_a_copy_until_they_are_dropped(keep_memory: bool) -> None:
    model = tiny_model("llama", dtype=torch.float32)
    compiled = CompiledForward.of(model)
    assert not compiled.is_prepared
    batch = ragged([NewTokens(tokens(5), 0, [0])], KEYS)
    before = compiled.logits(compiled.hidden(batch, pool_of(1)))
    assert compiled.is_prepared
    assert compiled.num_bytes >= model.weights.nbytes * 0.9
    with torch.no_grad():
        model.module.model.layers[0].mlp.up_proj.weight.mul_(0.5)
    assert torch.equal(compiled.logits(compiled.hidden(batch, pool_of(1))), before)
    compiled.drop(keep_memory=keep_memory)
    assert not compiled.is_prepared
    assert (compiled.num_bytes >= model.weights.nbytes * 0.9) == keep_memory
    after = compiled.logits(compiled.hidden(batch, pool_of(1)))
    torch.testing.assert_close(after, module_logits(model, tokens(5)), rtol=1e-4, atol=1e-4)
    assert not torch.equal(after, before)


@needs_vectors
def test_float64_is_refused() -> None:
    with pytest.raises(Refused, match="float64"):
        CompiledForward.of(tiny_model("llama"))


@needs_vectors
def test_by_vectors_in_bfloat16_where_there_is_a_matrix_unit() -> None:
    """As on a CPU without one: near the other logits, and the same to the bit in chunks and whole."""
    compiled = CompiledForward.of(shared_model("llama", torch.bfloat16))
    token_ids = tokens(40)

    def logits(chunks: list[int]) -> torch.Tensor:
        pool, at, found = pool_of(3), 0, []
        for count in chunks:
            batch = ragged([NewTokens(token_ids[at : at + count], at, [2, 0, 1])], KEYS)
            found.append(compiled.logits(compiled.hidden(batch, pool)))
            at += count
        return torch.cat(found)

    expected = logits([40])
    compiled.settings.sizes = compiled.settings.sizes._replace(matrix=0)
    compiled.room = None
    whole = logits([40])
    assert torch.equal(logits([1, 20, 3, 16]), whole)
    torch.testing.assert_close(whole, expected, rtol=0, atol=0.06 * float(expected.abs().max()))


@needs_vectors
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("width", "outputs", "rows"),
    [
        (64, 32, 1),
        (66, 50, 15),
        (576, 96, 33),
        (34, 7, 3),
        (66, 128, 5),
        (96, 64, 16),
        (1056, 50, 100),
        (704, 40, 270),
    ],
)
@pytest.mark.parametrize("by_unit", [False, True], ids=["vectors", "matrix unit"])
def test_a_product_with_a_bias(dtype: torch.dtype, width: int, outputs: int, rows: int, by_unit: bool) -> None:
    """Where the CPU has no matrix unit, both are by vectors."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator) for shape in ((rows, width), (outputs, width), (outputs,))
    )
    x, weight = x.to(dtype), weight.to(dtype)
    half = outputs // 2
    parts = [(weight[:half], bias[:half]), (weight[half:], None)]
    laid_out = torch.zeros(panels_of(parts), dtype=torch.uint32)
    lay_out(parts, laid_out)
    out = torch.empty(rows, laid_out.shape[0] * products.TILE_COLUMNS, dtype=dtype)
    as_array = paged_attention.array_of
    matrix = by_unit and paged_attention.by_matrix_unit(dtype)
    products.product(as_array(x), as_array(x), laid_out.data_ptr(), (width, outputs), as_array(out), rows, 0, 1, matrix)
    exact = x.double() @ weight.double().t()
    exact[:, :half] += bias[:half]
    bound = 5e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(out[:, :outputs].double(), exact, rtol=bound, atol=bound)
    for row in {0, rows // 2, rows - 1}:  # alone
        x_1K, out_1N = x[row : row + 1].contiguous(), torch.empty_like(out[:1])
        products.product(
            as_array(x), as_array(x_1K), laid_out.data_ptr(), (width, outputs), as_array(out_1N), 1, 0, 1, matrix
        )
        assert torch.equal(out_1N[0, :outputs], out[row, :outputs])
