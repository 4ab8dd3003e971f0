"""The rotation of queries and keys against the family's own and float64: on a GPU where there is one, else by Triton's
interpreter. Without triton these are skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from plait.kernels import device_rotation
from plait.models.compute import rope, row_kernel_proof
from plait.models.compute.layer_forms import Rotation
from plait.models.compute.row_kernel_proof import RowKernel, error_of, is_proven
from tests import warm
from tests.kernels.interpreted_bfloat16 import interpret_bfloat16

pytest.importorskip("triton", reason="triton is not installed: the rotation of GPUs is not tested")

pytestmark = [pytest.mark.cuda] if warm.HAS_GPU else []
WHERE = "cuda" if warm.HAS_GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(5, 1, 8), (12, 2, 128), (5, 3, 40), (9, 3, 256)]
"""Query heads, key heads, head size: heads in one part and in several, and halves that are no power of two."""


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are of a GPU, where there is one. Without, the kernel is interpreted."""
    if not warm.HAS_GPU:
        interpret_bfloat16(monkeypatch)
        monkeypatch.setattr(device_rotation, "serves", lambda device: True)
        monkeypatch.setattr(row_kernel_proof, "PROOF_ROWS", 7)


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(WHERE, dtype)


def given(sizes: tuple[int, int, int], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Queries and keys as projections leave them, cos and sin that differ between the halves; and gradients of queries
    in the same order of memory, of keys in another."""
    query_heads, key_heads, size = sizes
    rows = [drawn(1, 7, heads, size, dtype=dtype, seed=heads) for heads in (query_heads, key_heads)]
    query, key = (row.transpose(1, 2).requires_grad_() for row in rows)
    cos, sin = drawn(2, 1, 7, size, dtype=dtype, seed=0).unbind()
    grads = [drawn(1, heads, 7, size, dtype=dtype, seed=heads + 1) for heads in (query_heads, key_heads)]
    grads[0] = grads[0].transpose(1, 2).contiguous().transpose(1, 2)
    return [query, key, cos, sin], grads


def refused(*_: Tensor) -> tuple[Tensor, Tensor]:
    raise AssertionError("the family's own is called")


def passes(function: Any, inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Both outputs, and the gradients of queries and keys."""
    out = function(*inputs)
    return [*(x.detach() for x in out), *torch.autograd.grad(out, inputs[:2], grads)]


def ours(*inputs: Tensor) -> Any:
    return rope.rotated(refused, *inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_it_is_the_familys_own_to_the_bit_and_so_is_its_gradient(
    sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    inputs, grads = given(sizes, dtype)
    found, expected = passes(ours, inputs, grads), passes(apply_rotary_pos_emb, inputs, grads)
    assert all(map(torch.equal, found, expected))
    assert all(x.transpose(1, 2).is_contiguous() for x in found), "the heads of a token are side by side"


@pytest.mark.parametrize("sizes", SIZES)
def test_it_says_what_float64_says(sizes: tuple[int, int, int]) -> None:
    """By the matrix of the rotation, row by row, and its transpose."""
    inputs, grads = given(sizes, torch.float32)
    found = passes(ours, inputs, grads)
    query, key, cos, sin = (x.detach().double() for x in inputs)
    size = sizes[2]
    turned = torch.zeros(size, size, dtype=torch.float64, device=WHERE)
    for low in range(size // 2):
        turned[low, low + size // 2], turned[low + size // 2, low] = -1, 1
    matrix_TDD = torch.diag_embed(cos[0]) + sin[0, :, :, None] * turned
    forward = [torch.einsum("tde,bhte->bhtd", matrix_TDD, x) for x in (query, key)]
    backward = [torch.einsum("ted,bhte->bhtd", matrix_TDD, x.double()) for x in grads]
    for actual, true in zip(found, forward + backward, strict=True):
        torch.testing.assert_close(actual.double(), true, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 80, 128])
def test_it_is_proven(size: int, dtype: torch.dtype, capsys: pytest.CaptureFixture) -> None:
    kind = RowKernel(torch.device(WHERE), dtype, size, Rotation.HALVES)
    assert is_proven.__wrapped__(kind), capsys.readouterr().err
    assert error_of(kind) < (1e-6 if dtype == torch.float32 else 1e-2)


def test_parts_of_heads_are_rotated_where_they_lie() -> None:
    """As some families give them: the rest of a head passes by."""
    inputs, grads = given((5, 1, 24), torch.float32)
    inputs = [inputs[0][..., 4:20], inputs[1][..., :16], inputs[2][..., :16], inputs[3][..., 8:]]
    grads = [grad[..., :16] for grad in grads]
    assert all(map(torch.equal, passes(ours, inputs, grads), passes(apply_rotary_pos_emb, inputs, grads)))


def test_a_gradient_of_one_number_everywhere() -> None:
    inputs, _ = given((5, 1, 8), torch.float32)
    found = [torch.autograd.grad(sum(x.sum() for x in of(*inputs)), inputs[:2]) for of in (ours, apply_rotary_pos_emb)]
    assert all(map(torch.equal, *found))


def test_only_queries_are_trained() -> None:
    inputs, _ = given((5, 1, 8), torch.float32)
    inputs[1] = inputs[1].detach()
    found = [torch.autograd.grad(of(*inputs)[0].square().sum(), inputs[0])[0] for of in (ours, apply_rotary_pos_emb)]
    assert found[0].equal(found[1])


def test_rotated_queries_may_be_changed_in_place() -> None:
    (query, key, cos, sin), (grad, _) = given((5, 1, 8), torch.float32)
    grads = [
        torch.autograd.grad(change(ours(query, key, cos, sin)[0]), query, grad)[0]
        for change in (lambda x: x * 2, lambda x: x.mul_(2))
    ]
    assert torch.equal(*grads)


def test_rotations_of_another_form_are_the_familys_own() -> None:
    (query, key, cos, sin), _ = given((5, 1, 8), torch.float32)
    for case in (
        (query, key, cos[..., :4], sin[..., :4]),
        (query, key, cos, sin, 1),
        (query, key[:, :, :5], cos, sin),
        (query.double(), key.double(), cos.double(), sin.double()),
        (query.bfloat16(), key.bfloat16(), cos, sin),
        (query.expand(2, -1, -1, -1), key.expand(2, -1, -1, -1), cos, sin),
    ):
        with pytest.raises(AssertionError, match="own is called"):
            rope.rotated(refused, *case)


def test_a_token_has_the_same_bits_in_any_company() -> None:
    (query, key, cos, sin), _ = given((5, 1, 40), torch.bfloat16)
    whole = ours(query, key, cos, sin)
    part = ours(query[:, :, 2:5], key[:, :, 2:5], cos[:, 2:5], sin[:, 2:5])
    assert all(x[:, :, 2:5].equal(y) for x, y in zip(whole, part, strict=True))
