"""Pieces of a packed row: the cut covers every token once, and any cut computes the dense masked attention."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plait.data.packed import Group, PackedBatch, Span, pack
from plait.models.compute import packed_attention, pieces
from plait.models.compute.attention import PackedContext
from plait.models.compute.attention_form import AttentionForm
from plait.models.compute.packed_attention import plan
from plait.models.compute.pieces import Piece, cut
from tests.cases import examples, slow_but

HQ, HKV, D, E = 6, 2, 4, 3


def a_batch(*shape: tuple[int, list[int]], root: int = 0) -> PackedBatch:
    """Groups of prompts with so many tokens behind the root."""
    groups = [([1] * (root + prompt), [[1] * response for response in responses]) for prompt, responses in shape]
    return pack(groups, root_tokens=root)


def tensors(num_tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return draw(HQ, num_tokens, D), draw(HKV, num_tokens, D), draw(HKV, num_tokens, E), draw(HQ)


def dense(batch: PackedBatch, q: Tensor, k: Tensor, v: Tensor, s: Tensor | None, options: dict) -> Tensor:
    """One dense softmax over the whole row, every score computed, written from the definition."""
    sample_of, prompt_of = [("root", None)] * batch.root.length, [-1] * batch.root.length
    for index, group in enumerate(batch.groups):
        sample_of += [(index, None)] * group.prompt.length
        for number, span in enumerate(group.responses):
            sample_of += [(index, number)] * span.length
        prompt_of += [index] * (group.stop - group.prompt.start)
    positions, num_tokens = batch.position_ids_T, batch.num_tokens
    seen = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for row in range(num_tokens):
        for col in range(num_tokens):
            same = sample_of[col] in (sample_of[row], (prompt_of[row], None), ("root", None))
            behind = int(positions[row] - positions[col])
            seen[row, col] = same and behind >= 0 and (options["window"] is None or behind < options["window"])
    scores = torch.einsum("hqd,hkd->hqk", q, k.repeat_interleave(HQ // HKV, 0)) * options["scale"]
    if options["softcap"] is not None:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    scores = scores.masked_fill(~seen, float("-inf"))
    if s is not None:
        scores = torch.cat([scores, s[:, None, None].expand(-1, num_tokens, 1)], -1)
    probs = scores.softmax(-1)[..., :num_tokens]
    return torch.einsum("hqk,hke->qhe", probs, v.repeat_interleave(HQ // HKV, 0))


def mixed(root: int = 0) -> PackedBatch:
    """Groups alike and unlike, a prompt of one token, empty responses, prompts alone, one of them as long as the root
    may be."""
    return a_batch((4, []), (7, [5, 0, 9]), *[(1, [1, 8])] * 5, (4, []), (2, [11]), (7, [5, 0, 9]), root=root)


def with_gradients(got: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """A result, and gradients of a sum that weighs its elements differently."""
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return [got.detach(), *torch.autograd.grad((got * weights).sum(), inputs)]


@pytest.fixture(scope="module")
def dense_of_mixed() -> Callable[[int, int], list[Tensor]]:
    """What is right of `mixed` by a number of `OPTIONS` and a root, computed once."""

    def by(which: int, root: int) -> list[Tensor]:
        options, batch = OPTIONS[which], mixed(root)
        q, k, v, s = tensors(batch.num_tokens)
        sinks = s if options["sinks"] else None
        inputs = [q, k, v, s] if options["sinks"] else [q, k, v]
        return with_gradients(dense(batch, q, k, v, sinks, {**options, "scale": 0.6}), inputs)

    return functools.cache(by)


OPTIONS = [
    {"window": None, "softcap": None, "sinks": False},
    {"window": 4, "softcap": None, "sinks": False},
    {"window": None, "softcap": 1.5, "sinks": False},
    {"window": 3, "softcap": None, "sinks": True},
    {"window": 1, "softcap": 0.8, "sinks": True},
]
CUTS = {"whole groups": (10**12, 64), "every tile": (-(10**6), 64), "tiny tiles": (0, 3), "as shipped": (None, None)}
ALL = list(itertools.product([0, 4], range(len(OPTIONS)), CUTS, [True, False], [0, 1500, 1 << 19]))


# Every seventh: among them are every two of these, whichever.
@pytest.mark.parametrize(("root", "which", "name", "keep_probs", "block_scores"), slow_but(ALL[::7], ALL))
def test_every_cut_computes_the_dense_attention(
    root: int,
    which: int,
    name: str,
    keep_probs: bool,
    block_scores: int,
    dense_of_mixed: Callable[[int, int], list[Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_attention, "BLOCK_SCORES", block_scores)
    cost, tile = CUTS[name]
    if cost is not None:
        monkeypatch.setattr(pieces, "PIECE_COST", cost)
        monkeypatch.setattr(pieces, "TILE_TOKENS", tile)
    if not keep_probs:
        monkeypatch.setattr(packed_attention, "KEPT_SCORES", 0)
    options, batch = OPTIONS[which], mixed(root)
    q, k, v, s = tensors(batch.num_tokens)
    inputs = [q, k, v, s] if options["sinks"] else [q, k, v]
    sinks = s if options["sinks"] else None
    form = AttentionForm(sinks=sinks, scale=0.6, window=options["window"], softcap=options["softcap"])
    got, *gradients = with_gradients(PackedContext(batch).attend(0, q, k, v, form), inputs)
    expected, *wanted = dense_of_mixed(which, root)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    for ours, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_bfloat16_stays_near_float64() -> None:
    batch = a_batch((20, [30, 17]))
    wide = tensors(batch.num_tokens)
    narrow = [tensor.detach().bfloat16() for tensor in wide]
    options = {"scale": 0.5, "window": None, "softcap": None}
    got = PackedContext(batch).attend(0, *narrow[:3], AttentionForm(sinks=narrow[3], **options))
    expected = dense(batch, *(tensor.double() for tensor in narrow), options)
    assert got.dtype == torch.bfloat16
    assert (got.double() - expected).abs().max() < 0.03


group_shapes = st.lists(
    st.tuples(st.integers(1, 700), st.lists(st.integers(0, 900), max_size=5)), min_size=1, max_size=4
)


@settings(max_examples=examples(25, 60), deadline=None)
@given(group_shapes, st.integers(1, 64), st.one_of(st.none(), st.integers(1, 500)))
def test_a_cut_covers_every_token_once_and_shows_it_all_it_may_see(
    shape: list, num_heads: int, window: int | None
) -> None:
    batch = a_batch(*shape)
    rows = []
    for piece in cut(batch.groups, num_heads, window):
        rows += range(piece.rows.start, piece.rows.stop)
        keys = {at for span in (*piece.context, piece.rows) for at in range(span.start, span.stop)}
        for row in {piece.rows.start, piece.rows.stop - 1}:
            assert visible(batch.groups, row, window) <= keys
    assert rows == list(range(batch.num_tokens))


def visible(groups: tuple[Group, ...], row: int, window: int | None) -> set[int]:
    group = next(group for group in groups if group.prompt.start <= row < group.stop)
    if row < group.prompt.stop:
        chain = list(range(group.prompt.start, row + 1))
    else:
        own = next(span for span in group.responses if span.start <= row < span.stop)
        chain = [*range(group.prompt.start, group.prompt.stop), *range(own.start, row + 1)]
    return set(chain if window is None else chain[-window:])


def test_short_responses_share_a_piece_and_long_ones_do_not() -> None:
    short = cut(a_batch((32, [4] * 6)).groups, num_heads=8)
    assert [piece.rows for piece in short] == [Span(0, 56)]
    long = cut(a_batch((128, [150, 150])).groups, num_heads=8)
    assert long == (
        Piece(Span(0, 128), ()),
        Piece(Span(128, 150), (Span(0, 128),)),
        Piece(Span(278, 150), (Span(0, 128),)),
    )


def test_a_long_segment_computes_half_its_square() -> None:
    pieces_of_prompt = cut(a_batch((4096, [])).groups, num_heads=32)
    assert sum(piece.num_scores for piece in pieces_of_prompt) < 0.56 * 4096**2


def test_a_window_leaves_out_what_no_row_sees() -> None:
    pieces_of_prompt = cut(a_batch((4096, [])).groups, num_heads=32, window=100)
    assert max(piece.num_keys for piece in pieces_of_prompt) <= 2 * pieces.TILE_TOKENS + 100


def test_the_plan_is_made_once_per_window() -> None:
    batch = a_batch((5, [3, 4]))
    context = PackedContext(batch)
    q, k, v, _ = tensors(batch.num_tokens)
    for layer, window in enumerate((None, 4, None, 4)):
        context.attend(layer, q, k, v, AttentionForm(1.0, window))
    assert set(context._plans) == {None, 4}


def test_equal_neighbours_are_computed_together_as_far_as_a_cache_goes() -> None:
    batch = a_batch(*[(128, [128])] * 16, (128, [127]))
    blocks = plan(batch, 4, None, torch.bfloat16).blocks
    assert [block.count for block in blocks] == [8, 8, 4, 4, 4, 4, 1, 1]
    assert [block.piece.rows.start for block in blocks[:4]] == [0, 8 * 256, 128, 128 + 4 * 256]
    ragged = a_batch(*[(128, [100 + i]) for i in range(16)])
    assert {block.count for block in plan(ragged, 4, None, torch.bfloat16).blocks} == {1}


def test_many_probabilities_are_not_kept() -> None:
    batch = a_batch((700, [900] * 5))
    assert plan(batch, 4, None, torch.float32).keep_probs
    assert not plan(batch, 64, None, torch.float32).keep_probs
