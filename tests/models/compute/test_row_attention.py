"""Attention over a packed row by FlexAttention: its rule, its blocks and its results are those of the pieces.

On a CPU torch computes FlexAttention without its kernel, over whole rows, and refuses gradients that it could compute:
the refusal is lifted here.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint as recompute

from plait.data.packed import pack
from plait.models.compute import flex_plan, row_attention
from plait.models.compute.attention import PackedContext
from plait.models.compute.attention_form import AttentionForm
from plait.models.compute.flex_plan import FlexPlan, block_mask, blocks
from plait.models.compute.packed_attention import plan
from plait.models.compute.row_attention import FLEX, Attention, Way, error_of, is_proven, row_plan
from plait.models.compute.visibility import Places, places, sees
from tests.cases import slow_but
from tests.models.compute.test_attention import a_batch

ROOTS = st.sampled_from([0, 1, 5])
GROUPS = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), max_size=3)), min_size=1, max_size=4)
KIND = Attention(torch.device("cpu"), torch.float32, 4, 2, 16, 24, AttentionForm(0.3), False)


pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    return flex_attention.flex_attention


def by(kernel) -> Way:
    """FlexAttention by such a kernel."""
    return FLEX._replace(planned=lambda batch, kind: FlexPlan.of(batch, kind.form.window, kernel))


def whole(row: Places, window: int | None) -> np.ndarray:
    queries, keys = (Places(*(column[at] for column in row)) for at in ((slice(None), None), (None, slice(None))))
    return sees(queries, keys, window)


@given(GROUPS, ROOTS, st.sampled_from([None, 1, 4, 11]))
def test_the_rule_hides_what_the_biases_of_the_pieces_hide(groups, root, window) -> None:
    """Each piece has its keys and a bias over the last of them; all others of the row are hidden."""
    batch = a_batch(*groups, root=root)
    seen = np.zeros((batch.num_tokens, batch.num_tokens), bool)
    for block in plan(batch, 2, window, torch.float64).blocks:
        for number in range(block.count):
            shift = number * block.stride
            spans = [*block.piece.context, block.piece.rows]
            moved = [0 if span.stop <= block.root else shift for span in spans]
            keys = np.concatenate([np.arange(s.start, s.stop) + by for s, by in zip(spans, moved, strict=True)])
            rows = np.arange(block.piece.rows.start, block.piece.rows.stop) + shift
            shown = np.ones((len(rows), len(keys)), bool)
            shown[:, len(keys) - block.bias.shape[1] :] = block.bias.numpy() == 0
            seen[np.ix_(rows, keys)] = shown
    assert (whole(places(batch), window) == seen).all()


@settings(deadline=None)
@given(GROUPS, ROOTS, st.sampled_from([None, 1, 4, 11]))
def test_no_block_is_left_out_that_has_something_to_see_and_none_is_whole_that_hides(groups, root, window) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_plan, "BLOCK", 4)
        row = places(a_batch(*groups, root=root))
        some, every = blocks(row, window)
    seen = whole(row, window)
    for query, key in np.ndindex(some.shape):
        there = seen[4 * query : 4 * query + 4, 4 * key : 4 * key + 4]
        assert some[query, key] or not there.any()
        assert not every[query, key] or (there.all() and there.shape == (4, 4) and some[query, key])


def test_a_block_in_which_all_see_all_is_known() -> None:
    """A prompt of 4, and 4 tokens that go on: the second block sees all of the first, and itself in part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_plan, "BLOCK", 4)
        some, every = blocks(places(a_batch((4, [4, 4]))), None)
    assert some.tolist() == [[True, False, False], [True, True, False], [True, False, True]]
    assert every.tolist() == [[False, False, False], [True, False, False], [True, False, False]]


def test_blocks_of_the_root_are_seen_by_all() -> None:
    """A root of 4, two prompts of 4: each sees the root, and itself in part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_plan, "BLOCK", 4)
        some, every = blocks(places(a_batch((4, []), (4, []), root=4)), None)
    assert some.tolist() == [[True, False, False], [True, True, False], [True, False, True]]
    assert every.tolist() == [[False, False, False], [True, False, False], [True, False, False]]


def test_the_mask_has_the_blocks_and_the_rule() -> None:
    batch = a_batch((200, [150, 7]), (40, [1]))
    mask = block_mask(batch, 90)
    some, every = blocks(places(batch), 90)
    dense = mask.to_dense()[0, 0].bool().numpy()
    assert (dense == (some | every)).all()
    assert mask.shape == (1, 1, 398, 398)
    index = torch.arange(398)
    rule = mask.mask_mod(torch.tensor(0), torch.tensor(0), index[:, None], index[None, :])
    assert (rule.numpy() == whole(places(batch), 90)).all()


FORMS = [AttentionForm(0.3), AttentionForm(0.2, window=50), AttentionForm(0.25, window=129, softcap=1.5)]


@pytest.mark.parametrize(
    ("form", "has_sinks"),
    slow_but([(FORMS[1], True), (FORMS[2], False)], itertools.product(FORMS, [False, True])),
    ids=str,
)
def test_it_computes_what_the_pieces_compute(form: AttentionForm, has_sinks: bool, eager) -> None:
    """Output and gradients of queries, keys, values and sinks."""
    assert error_of(KIND._replace(form=form, has_sinks=has_sinks), by(eager)) < 2e-6
    wide = KIND._replace(form=form, has_sinks=has_sinks, dtype=torch.float64)
    assert error_of(wide, by(eager)) < 1e-13


def test_a_kernel_that_says_something_else_is_not_used(eager, capsys: pytest.CaptureFixture) -> None:
    def wrong(*tensors: Tensor, **options):
        out, found = eager(*tensors, **options)
        return out * 1.01, found

    assert is_proven(KIND, by(eager))
    assert capsys.readouterr().err == ""
    way = by(wrong)
    assert not is_proven(KIND, way)
    assert not is_proven(KIND, way)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("plait: FlexAttention, for training, is 0.01 away from what attention in pieces says: ")
    assert line.endswith("attention is computed in pieces, slower")


def test_a_kernel_that_says_nothing_in_a_gradient_is_not_used(eager, capsys: pytest.CaptureFixture) -> None:
    def broken(query: Tensor, key: Tensor, *others: Tensor, **options):
        key.register_hook(lambda grad: grad * float("nan"))
        return eager(query, key, *others, **options)

    assert not is_proven(KIND, by(broken))
    assert "is nan away" in capsys.readouterr().err


def test_a_kernel_that_cannot_be_compiled_is_not_used(capsys: pytest.CaptureFixture) -> None:
    def broken(*tensors: Tensor, **options):
        raise RuntimeError("no such instruction\nat line 3")

    assert not is_proven(KIND, by(broken))
    assert "cannot be used here (RuntimeError: no such instruction): attention is" in capsys.readouterr().err


def test_it_is_used_where_a_device_has_a_kernel(eager, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with the computation of a CPU: a context's rows pass the kernel, and small heads the pieces."""
    batch = pack([([1] * 20, [[1] * 9, [1] * 30]), ([1] * 4, [[1] * 5])])
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(heads, batch.num_tokens, 16, generator=generator) for heads in (4, 2, 2))
    form = AttentionForm(0.25)
    expected = PackedContext(batch).attend(0, query, key, value, form)
    monkeypatch.setattr(row_attention, "has_kernel", lambda kind: kind.key_size >= 16)
    monkeypatch.setattr(flex_plan, "compiled", lambda: eager)
    assert isinstance(row_plan(batch, query, key, value, form), FlexPlan)
    assert not isinstance(row_plan(batch, query[..., :8], key[..., :8], value, form), FlexPlan)
    torch.testing.assert_close(PackedContext(batch).attend(0, query, key, value, form), expected)


def test_a_layer_that_is_computed_again_may_be_the_first_to_ask(
    eager, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """What the proof saves for its own backward is none of what the layer saves."""
    batch = pack([([1] * 20, [[1] * 9, [1] * 30]), ([1] * 4, [[1] * 5])])
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randn(heads, batch.num_tokens, 16, generator=generator) for heads in (4, 2, 2)]
    form, grad = AttentionForm(0.25), torch.randn(batch.num_tokens, 4, 16, generator=generator)

    def gradients(checkpointed: bool) -> list[Tensor]:
        leaves, context = [tensor.clone().requires_grad_() for tensor in drawn], PackedContext(batch)

        def layer(*tensors: Tensor) -> Tensor:
            query, key, value = (tensor.tanh() for tensor in tensors)
            return context.attend(0, query, key, value, form).sigmoid()

        out = recompute(layer, *leaves, use_reentrant=False) if checkpointed else layer(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    expected = gradients(False)
    monkeypatch.setattr(row_attention, "has_kernel", lambda kind: True)
    monkeypatch.setattr(flex_plan, "compiled", lambda: eager)
    is_proven.cache_clear()
    torch.testing.assert_close(gradients(True), expected)
    assert is_proven.cache_info().currsize == 1
    assert capsys.readouterr().err == ""


def test_a_cpu_computes_in_pieces() -> None:
    assert not row_attention.has_kernel(KIND)
    gpu = KIND._replace(device=torch.device("cuda", 0), form=replace(KIND.form, window=4))
    assert row_attention.has_kernel(gpu)
    assert not row_attention.has_kernel(gpu._replace(dtype=torch.float64))


def test_it_is_compiled_once_for_rows_of_any_length_and_for_as_many_kinds_as_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Traced as for a kernel, with gradients and without; more kinds than torch allows unless told."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    traced: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        traced.append(len(inputs))
        return graph.forward

    kernel = flex_plan.compiled(count)
    rows = [a_batch((200, [150, 7]), (40, [1])), a_batch((130, [20])), a_batch((300, [2, 3, 4]))]
    plain, windowed, capped = FORMS
    kinds = [(2, True, plain), (4, True, windowed), (4, True, capped), (2, False, windowed)]
    with torch._dynamo.config.patch(recompile_limit=len(kinds) - 2):
        for heads, grads, form in kinds:
            before = len(traced)
            for batch in rows:
                drawn = [torch.randn(count, batch.num_tokens, 16, requires_grad=grads) for count in (heads, 2, 2)]
                with torch.set_grad_enabled(grads):
                    found = FlexPlan.of(batch, form.window, kernel).attend(*drawn, form)
                    expected = plan(batch, heads, form.window, torch.float32).attend(*drawn, form)
                torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
            assert len(traced) - before <= 1, (heads, grads, form)
        assert len(traced) > torch._dynamo.config.recompile_limit


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("dtype", "form", "has_sinks"), [(torch.bfloat16, FORMS[1], True), (torch.float32, FORMS[2], False)], ids=str
)
def test_the_kernel_of_a_gpu_says_what_the_pieces_say(
    dtype: torch.dtype, form: AttentionForm, has_sinks: bool, capsys: pytest.CaptureFixture
) -> None:
    """Compiled for it, forward and backward, with grouped heads."""
    kind = Attention(torch.device("cuda"), dtype, 9, 3, 64, 64, form, has_sinks)
    assert is_proven(kind, FLEX), capsys.readouterr().err
