"""Attention over a packed row by torch's FlashAttention operators: their sequences, and results that are those of the
pieces. A GPU is asked for the operators themselves; elsewhere plain torch stands in for them."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plait.data.packed import PackedBatch, Span
from plait.models.compute import flash_plan, flex_plan, row_attention
from plait.models.compute.attention import PackedContext
from plait.models.compute.attention_form import AttentionForm
from plait.models.compute.flash_plan import FlashPlan, Queries, deterministic, evened, sequences, takes
from plait.models.compute.flex_plan import FlexPlan
from plait.models.compute.packed_attention import PackedPlan, plan
from plait.models.compute.row_attention import (
    FLASH,
    Attention,
    RowPlan,
    Way,
    error_of,
    has_operator,
    is_proven,
    row_plan,
)
from tests.models.compute import flash_stand_in
from tests.models.compute.flash_stand_in import STAND_IN
from tests.models.compute.test_attention import a_batch

ROOTS = st.sampled_from([0, 1, 5])
GROUPS = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), max_size=3)), min_size=1, max_size=4)
HEADS = st.sampled_from([(2, 2), (4, 2), (3, 1)])
KIND = Attention(torch.device("cpu"), torch.bfloat16, 4, 2, 16, 16, AttentionForm(0.3), False)


def by(operators: flash_plan.Operators) -> Way:
    return FLASH._replace(planned=lambda batch, kind: FlashPlan.of(batch, kind.query_heads, operators))


def drawn(batch: PackedBatch, heads: tuple[int, int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys and values as layers have them, by token."""
    generator = torch.Generator().manual_seed(batch.num_tokens)
    sizes = (heads[0], heads[1], heads[1])
    tensors = [torch.randn(batch.num_tokens, count, 8, generator=generator, dtype=torch.float64) for count in sizes]
    return [tensor.to(dtype).transpose(0, 1).requires_grad_() for tensor in tensors]


def passes(by_plan: RowPlan, tensors: list[Tensor], scale: float = 0.4) -> list[Tensor]:
    out = by_plan.attend(*tensors, AttentionForm(scale))
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


@given(GROUPS, ROOTS, HEADS, st.sampled_from([1, 7, 40]))
def test_it_computes_what_the_pieces_compute(groups, root, heads, multiprocessors) -> None:
    """Output and gradients, of sequences that are cut or whole."""
    batch = a_batch(*groups, root=root)
    tensors = drawn(batch, heads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_plan, "BLOCK", 2)
        patch.setattr(flash_plan, "multiprocessors_of", lambda device: multiprocessors)
        found = passes(FlashPlan.of(batch, heads[0], STAND_IN), tensors)
    expected = passes(plan(batch, heads[0], None, torch.float64), tensors)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_it_computes_in_bfloat16_what_the_pieces_compute_in_float32() -> None:
    batch = a_batch((9, [5, 0, 1]), (1, [7]), (4, []), root=5)
    narrow = drawn(batch, (4, 2), torch.bfloat16)
    found = passes(FlashPlan.of(batch, 4, STAND_IN), narrow)
    wide = [tensor.detach().float().requires_grad_() for tensor in narrow]
    expected = passes(plan(batch, 4, None, torch.float32), wide)
    assert all(tensor.dtype == torch.bfloat16 for tensor in found)
    for got, want in zip(found, expected, strict=True):
        assert (got.float() - want).norm() < 1e-2 * want.norm()


def test_sequences_of_a_small_row_by_hand() -> None:
    """Root 0 1; prompt 2 3 4 with responses 5 6, none, and 7; prompt 8 with 9 10 alone; prompt 11 without."""
    batch = a_batch((3, [2, 0, 1]), (1, [2]), (1, []), root=2)
    root, prompt = Span(0, 2), Span(2, 3)
    assert sequences(batch) == [
        Queries(root, (root,)),
        Queries(prompt, (root, prompt)),
        Queries(Span(5, 2), (root, prompt, Span(5, 2))),
        Queries(Span(7, 1), (root, prompt, Span(7, 1))),
        Queries(Span(8, 3), (root, Span(8, 3))),
        Queries(Span(11, 1), (root, Span(11, 1))),
    ]
    made = FlashPlan.of(batch, 4, STAND_IN)
    assert made.starts_Q.tolist() == [0, 2, 5, 7, 8, 11, 12]
    assert made.starts_K.tolist() == [0, 2, 7, 14, 20, 25, 28]
    assert made.longest == (3, 7)
    assert made.table is not None
    keys = [0, 1, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 7, 0, 1, 8, 9, 10, 0, 1, 11]
    assert made.table.token_K.tolist() == keys
    assert made.table.starts_T1.tolist() == [0, 6, 12, 15, 18, 21, 22, 23, 24, 25, 26, 27, 28]
    assert made.table.of_tokens_K[:9].tolist() == [0, 2, 7, 14, 20, 25, 1, 3, 8]
    assert {table.dtype for table in (made.starts_Q, made.starts_K, *vars(made.table).values())} == {torch.int32}


def test_keys_that_nobody_shares_lie_as_they_are() -> None:
    """Prompts with one response each, and one without."""
    batch = a_batch((3, [2]), (2, [0, 4]), (5, []))
    made = FlashPlan.of(batch, 2, STAND_IN._replace(gathered=lambda *of: pytest.fail("they are laid out")))
    assert made.table is None
    assert made.starts_Q.tolist() == made.starts_K.tolist() == [0, 5, 11, 16]
    tensors = drawn(batch, (2, 1))
    torch.testing.assert_close(passes(made, tensors), passes(plan(batch, 2, None, torch.float64), tensors))


def test_a_sequence_with_more_than_its_share_is_cut() -> None:
    """Of 8 heads 8 sequences have a program each, of 64 multiprocessors. All have 1,024² / 2 + 7 · 256² / 2 scores, of
    which a sequence may have an eighth: the long one is cut into six, each behind all that came before."""
    long, short = Span(0, 1024), [Span(1024 + 256 * number, 256) for number in range(7)]
    whole = [Queries(span, (span,)) for span in (long, *short)]
    found = evened(whole, 8, 64)
    ends = [384, 640, 768, 896, 1024]  # 418, 591, 724, 836, 935 as multiples of 128; two of them are one
    starts = [0, *ends[:-1]]
    assert found[:5] == [
        Queries(Span(start, end - start), (Span(0, end),)) for start, end in zip(starts, ends, strict=True)
    ]
    assert found[5:] == whole[1:]
    assert evened(whole, 8, 8) == whole, "more programs than multiprocessors, which even out by themselves"
    assert evened(whole[:1], 8, 64) == whole[:1], "the operator itself deals out a sequence that is alone"


def test_a_sequence_is_cut_into_fewer_parts_if_keys_became_too_many() -> None:
    """1,024 queries behind 6,144 keys, which each of their parts has again, beside sequences of 200: the fewer of
    these, the fewer parts have no more than 9 keys for each token."""
    context, rows = Span(0, 6144), Span(6144, 1024)
    long, short = Queries(rows, (context, rows)), Queries(Span(7168, 200), (Span(7168, 200),))
    for others, parts in ((40, 8), (20, 4), (10, 2), (1, 1)):
        found = evened([long, *[short] * others], 1, 400)
        assert len(found) == parts + others
        assert sum(queries.num_keys for queries in found) <= 9 * (1024 + 200 * others)


@given(GROUPS, ROOTS, st.integers(1, 8), st.integers(1, 200))
def test_cut_sequences_are_all_queries_with_what_they_see(groups, root, heads, multiprocessors) -> None:
    batch = a_batch(*groups, root=root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_plan, "BLOCK", 2)
        found = evened(sequences(batch), heads, multiprocessors)
    rows = [row for queries in found for row in range(queries.rows.start, queries.rows.stop)]
    assert rows == list(range(batch.num_tokens))
    assert all(queries.rows.length > 0 for queries in found)
    for queries in found:
        last = int(batch.position_ids_T[queries.rows.stop - 1])
        assert queries.num_keys == last + 1
        assert queries.keys[-1].stop == queries.rows.stop


def test_it_takes_rows_whose_tokens_see_all_and_whose_keys_are_few() -> None:
    batch = a_batch((3, [2, 4]), (6, [2]), root=5)
    assert takes(batch, None)
    assert takes(batch, 13), "the longest sample has 5 + 6 + 2 tokens"
    assert not takes(batch, 12)
    assert takes(a_batch((100, [20] * 16)), None), "16 · 120 + 100 keys of 420 tokens"
    assert not takes(a_batch((100, [2] * 16)), None), "16 · 102 + 100 keys of 132 tokens"
    assert takes(a_batch((4, [])), 4)


def test_it_is_for_plain_attention_in_16_bits_on_a_gpu() -> None:
    gpu = KIND._replace(device=torch.device("cuda", 0))
    assert has_operator(gpu)
    assert has_operator(gpu._replace(dtype=torch.float16, key_size=256, value_size=256))
    assert has_operator(gpu._replace(form=replace(gpu.form, window=9))), "a row may be within it"
    assert not has_operator(KIND)
    assert not has_operator(gpu._replace(dtype=torch.float32))
    assert not has_operator(gpu._replace(value_size=24))
    assert not has_operator(gpu._replace(key_size=20, value_size=20))
    assert not has_operator(gpu._replace(key_size=264, value_size=264))
    assert not has_operator(gpu._replace(has_sinks=True))
    assert not has_operator(gpu._replace(form=replace(gpu.form, softcap=30.0)))


@pytest.mark.parametrize(("mode", "fills"), [*itertools.product((0, 1, 2), (True, False))])
def test_torch_is_as_it_was_though_the_operator_raises(mode: int, fills: bool) -> None:
    def broken(*tensors: Tensor, **options):
        assert torch.get_deterministic_debug_mode() == 2
        raise RuntimeError("no room")

    batch = a_batch((3, [2, 4]))
    out = FlashPlan.of(batch, 4, STAND_IN._replace(backward=broken)).attend(*drawn(batch, (4, 2)), AttentionForm(0.4))
    before = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    try:
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = fills
        with pytest.raises(RuntimeError, match="no room"):
            out.sum().backward()
        assert torch.get_deterministic_debug_mode() == mode
        assert torch.utils.deterministic.fill_uninitialized_memory == fills
        with deterministic():
            assert not torch.utils.deterministic.fill_uninitialized_memory
        assert torch.get_deterministic_debug_mode() == mode
        assert torch.utils.deterministic.fill_uninitialized_memory == fills
    finally:
        torch.set_deterministic_debug_mode(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.parametrize("operator", ["forward", "backward"])
def test_the_stand_in_has_the_signatures_of_the_operators(operator: str) -> None:
    real = getattr(torch.ops.aten, f"_flash_attention_{operator}").default._schema.arguments
    ours = inspect.signature(getattr(flash_stand_in, operator)).parameters.values()
    assert [one.name for one in real if not one.kwarg_only] == [
        one.name for one in ours if one.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    assert {one.name for one in ours} <= {one.name for one in real}


def test_the_proof_knows_right_from_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Its row has a root, prompts that are shared, and sequences that are cut."""
    assert error_of(KIND._replace(dtype=torch.float64), by(STAND_IN)) < 1e-12
    monkeypatch.setattr(flash_plan, "multiprocessors_of", lambda device: 132)
    cut: list[int] = []

    def counted(query: Tensor, key: Tensor, value: Tensor, starts_Q: Tensor, *said, **options):
        cut.append(len(starts_Q) - 1)
        return flash_stand_in.forward(query, key, value, starts_Q, *said, **options)

    assert error_of(KIND._replace(dtype=torch.float64), by(STAND_IN._replace(forward=counted))) < 1e-12
    assert cut[0] > 8
    assert is_proven(KIND, by(STAND_IN))
    assert capsys.readouterr().err == ""

    def wrong(*given, **options):
        query, key, value = flash_stand_in.backward(*given, **options)
        return query, key * 1.1, value

    assert not is_proven(KIND, by(STAND_IN._replace(backward=wrong)))
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "plait: the FlashAttention operator, for training, is 0.1 away from what attention in pieces says: "
        "attention is computed by FlexAttention, slower"
    )


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with the computation of a CPU."""
    as_there = {name: getattr(row_attention, name) for name in ("has_operator", "has_kernel")}
    for name, has in as_there.items():
        monkeypatch.setattr(
            row_attention, name, lambda kind, has=has: has(kind._replace(device=torch.device("cuda", 0)))
        )
    monkeypatch.setattr(flash_plan, "OPERATORS", STAND_IN)
    is_proven.cache_clear()
    yield
    is_proven.cache_clear()


def plan_of(batch: PackedBatch, form: AttentionForm, dtype: torch.dtype = torch.bfloat16, size: int = 16) -> RowPlan:
    tensors = [torch.zeros(heads, batch.num_tokens, size, dtype=dtype) for heads in (4, 2, 2)]
    return row_plan(batch, *tensors, form)


def test_what_it_is_not_for_goes_to_flex_attention(on_gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_attention, "FLEX", Way("Flex", lambda batch, kind: FlexPlan.of(batch, None, print), ""))
    monkeypatch.setattr(row_attention, "error_of", lambda kind, way: 0.0)
    batch, plain = a_batch((20, [9, 30]), (4, [5])), AttentionForm(0.25)
    assert isinstance(plan_of(batch, plain), FlashPlan)
    assert isinstance(plan_of(batch, replace(plain, window=50)), FlashPlan)
    assert is_proven.cache_info().currsize == 1, "one proof for windows of any length"
    assert isinstance(plan_of(batch, replace(plain, window=49)), FlexPlan)
    assert isinstance(plan_of(batch, replace(plain, softcap=3.0)), FlexPlan)
    assert isinstance(plan_of(batch, replace(plain, sinks=torch.zeros(4))), FlexPlan)
    assert isinstance(plan_of(batch, plain, torch.float32), FlexPlan)
    assert isinstance(plan_of(a_batch((60, [1] * 16)), plain), FlexPlan)
    assert isinstance(plan_of(batch, plain, size=8), FlashPlan)
    assert isinstance(plan_of(batch, plain, size=12), PackedPlan)


def test_where_it_fails_flex_attention_computes_and_then_the_pieces(
    on_gpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def broken(*given, **options):
        raise NotImplementedError("no kernel\nfor this GPU")

    monkeypatch.setattr(flash_plan, "OPERATORS", STAND_IN._replace(backward=broken))
    monkeypatch.setattr(flex_plan, "compiled", lambda: broken)
    batch = a_batch((20, [9, 30]), (4, [5]))
    assert isinstance(plan_of(batch, AttentionForm(0.25)), PackedPlan)
    assert isinstance(plan_of(batch, AttentionForm(0.25)), PackedPlan)
    first, second = capsys.readouterr().err.splitlines()
    assert first == (
        "plait: the FlashAttention operator, for training, cannot be used here (NotImplementedError: no kernel): "
        "attention is computed by FlexAttention, slower"
    )
    assert second.startswith("plait: FlexAttention, for training, cannot be used here (NotImplementedError: no kernel")


def test_a_context_passes_its_rows_to_it(on_gpu) -> None:
    batch = a_batch((20, [9, 30]), (4, [5]))
    narrow = [tensor.detach() for tensor in drawn(batch, (4, 2), torch.bfloat16)]
    found = PackedContext(batch).attend(0, *narrow, AttentionForm(0.4, window=50))
    expected = plan(batch, 4, None, torch.float32).attend(*(tensor.float() for tensor in narrow), AttentionForm(0.4))
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)


def test_torch_itself_knows_the_shapes_of_its_operators() -> None:
    """On tensors without numbers: what the operators give has the shapes of the stand-in's."""
    batch = a_batch((9, [5, 0, 1]), (1, [7]), (4, []), root=5)
    there = replace(batch, token_ids_T=batch.token_ids_T.to("meta"))
    own = flash_plan.Operators(gathered=flash_stand_in.gathered, folded=flash_stand_in.folded)
    tensors = drawn(batch, (4, 2), torch.bfloat16)
    without = [tensor.detach().to("meta").requires_grad_() for tensor in tensors]
    found = passes_without_numbers(FlashPlan.of(there, 4, own), without)
    expected = passes(FlashPlan.of(batch, 4, STAND_IN), tensors)
    assert [(x.shape, x.dtype, x.stride()) for x in found] == [(x.shape, x.dtype, x.stride()) for x in expected]


def passes_without_numbers(by_plan: RowPlan, tensors: list[Tensor]) -> list[Tensor]:
    out = by_plan.attend(*tensors, AttentionForm(0.4))
    return [out.detach(), *torch.autograd.grad(out, tensors, torch.empty_like(out))]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("dtype", "heads", "size"),
    [(torch.bfloat16, (12, 2), 128), (torch.float16, (9, 3), 64), (torch.bfloat16, (4, 4), 40)],
    ids=str,
)
def test_the_operators_of_a_gpu_say_what_the_pieces_say(
    dtype: torch.dtype, heads: tuple[int, int], size: int, capsys: pytest.CaptureFixture
) -> None:
    """With the kernels that lay keys out, forward and backward."""
    kind = Attention(torch.device("cuda"), dtype, *heads, size, size, AttentionForm(size**-0.5), False)
    assert is_proven(kind, FLASH), capsys.readouterr().err


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_same_bits_twice() -> None:
    """Where many blocks of keys add to the gradients of the same queries."""
    batch = a_batch((600, [900, 1300, 50]), (1000, [2000]), root=200)
    there = replace(batch, token_ids_T=batch.token_ids_T.to("cuda"))
    tensors = [tensor.detach().cuda().requires_grad_() for tensor in drawn(batch, (4, 2), torch.bfloat16)]
    by_plan, grad = FlashPlan.of(there, 4), torch.randn(batch.num_tokens, 4, 8, device="cuda", dtype=torch.bfloat16)

    def gradients() -> list[Tensor]:
        out = by_plan.attend(*tensors, AttentionForm(0.4))
        return [out.detach(), *torch.autograd.grad(out, tensors, grad)]

    first = gradients()
    assert all(one.equal(other) for _ in range(3) for one, other in zip(first, gradients(), strict=True))
