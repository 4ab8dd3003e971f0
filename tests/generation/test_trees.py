"""Drafts in trees, through whole models: each node has the logits of its path, whatever is computed beside it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from plait.data.packed import pack
from plait.generation.compiled_forward import CompiledForward
from plait.generation.paged import attention_for
from plait.generation.pool import KVPool
from plait.generation.ragged import NewTokens, RaggedBatch, ragged
from plait.generation.ragged_context import RaggedContext
from plait.kernels import paged_attention
from plait.kernels.paged_attention import KEYS
from plait.models.compute.attention import PackedContext
from plait.models.language_model import LanguageModel
from tests.generation.test_ragged import random_tree
from tests.models.tiny import tiny_model
from tests.training.exact import ExactFloat64

FAMILIES = ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe"]
"""Plain, a window, a soft-cap, sinks, MLA, a mixture."""
NODES = 9
Compute = Callable[[RaggedBatch, KVPool], Tensor]


def by_the_module(model: LanguageModel) -> Compute:
    def compute(batch: RaggedBatch, pool: KVPool) -> Tensor:
        return model.logits(
            model.hidden(
                batch.token_ids_T,
                batch.position_ids_T,
                RaggedContext(pool, batch, attention_for(model.device, model.dtype, pool.block_tokens)),
            )
        )

    return compute


def at_the_ends(model: LanguageModel, texts: list[list[int]]) -> Tensor:
    """Logits [N, V] behind texts, by the module over all of each, side by side in one row, without a pool."""
    row = pack([(token_ids, ()) for token_ids in texts])
    hidden_TH = model.hidden(row.token_ids_T, row.position_ids_T, PackedContext(row))
    return model.logits(hidden_TH[[group.prompt.stop - 1 for group in row.groups]])


@torch.no_grad()
def largest_error(model: LanguageModel, compute: Compute) -> float:
    """One step of a tree, a decode row, a chain, a fresh chunk and a chunk with a context, read at every node and at
    the last three rows of the others.

    Returns:
        The largest deviation of a logit, relative to the largest logit.
    """
    rng = random.Random(2)
    texts = [[rng.randrange(5, 300) for _ in range(count)] for count in (21, 12, 18, 37, 40)]
    of_tree, of_row, of_chain, fresh, continued = texts
    tables = {0: [5, 2], 1: [4], 2: [11, 3], 3: [7, 8, 9], 4: [0, 10, 1]}
    pool = KVPool(KEYS)
    pool.reserve(12, 12)
    held = [(of_row[:-1], tables[1]), (of_chain[:-3], tables[2])]
    for token_ids, table in (*held, (of_tree, tables[0]), (continued[:19], tables[4])):
        compute(ragged([NewTokens(token_ids, 0, table)], KEYS), pool)
    tree, nodes = random_tree(NODES, rng), [rng.randrange(5, 300) for _ in range(NODES)]
    assert tree.sum(1).max() > 2
    assert not tree.tril().equal(torch.ones_like(tree).tril()), "siblings, not a chain"
    step = [
        NewTokens(nodes, len(of_tree), tables[0], tree),
        NewTokens(of_row[-1:], len(of_row) - 1, tables[1]),
        NewTokens(of_chain[-3:], len(of_chain) - 3, tables[2]),
        NewTokens(fresh, 0, tables[3]),
        NewTokens(continued[19:], 19, tables[4]),
    ]
    logits_TV = compute(ragged(step, KEYS), pool)
    read = {node: of_tree + [nodes[i] for i in tree[node].nonzero()[:, 0].tolist()] for node in range(NODES)}
    stop = NODES
    for new, text in zip(step[1:], texts[1:], strict=True):
        stop += len(new.token_ids)
        for back in range(min(3, len(new.token_ids))):
            read[stop - 1 - back] = text[: len(text) - back]
    wanted_NV = at_the_ends(model, list(read.values()))
    return float((logits_TV[list(read)] - wanted_NV).abs().max() / wanted_NV.abs().max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_by_the_module(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype=dtype)
    with ExactFloat64() if dtype == torch.float64 else contextlib.nullcontext():
        assert largest_error(model, by_the_module(model)) < (1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.skipif(not paged_attention.fast(torch.float32), reason="no numba, or a CPU without AVX2")
@pytest.mark.parametrize("family", ["llama", "mistral", "smollm3"])
def test_by_the_compiled_forward(family: str) -> None:
    model = tiny_model(family, dtype=torch.float32)
    compiled = CompiledForward.of(model)
    assert largest_error(model, lambda batch, pool: compiled.logits(compiled.hidden(batch, pool))) < 1e-5
