"""Log-probs of several tokens and of the rest, and the likeliest tokens, against full logits in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from plait.models.compute.logprobs_at import chunked_logprobs_at, chunked_top_logprobs
from plait.models.head import Head
from tests.models.compute.test_logprobs import R, V, a_head, inputs

K, TEMPERATURE = 5, 0.7


def full(logits_RV: Tensor, ids_RK: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    logp_RV = (logits_RV / temperature).log_softmax(-1)
    rest_R = logp_RV.exp().scatter(1, ids_RK, 0.0).sum(-1)
    return torch.cat([logp_RV.gather(1, ids_RK), rest_R.log()[:, None]], dim=1)


def first(logits_RV: Tensor, count: int) -> Tensor:
    """The likeliest first, of equally likely ones the lowest id."""
    return logits_RV.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def test_by_hand() -> None:
    """Probabilities 1/8, 2/8, 5/8: of tokens 2 and 0, and 2/8 of the rest."""
    head = Head(lambda hidden: hidden, (), linear=False)
    logits = torch.tensor([[math.log(1), math.log(2), math.log(5)]], dtype=torch.float64)
    found = chunked_logprobs_at(head, logits, torch.tensor([[2, 0]]), 1.0)
    assert found.exp()[0].tolist() == pytest.approx([5 / 8, 1 / 8, 2 / 8])
    ids, found = chunked_top_logprobs(head, logits, 2, 1.0)
    assert ids.tolist() == [[2, 1]]
    assert found.exp()[0].tolist() == pytest.approx([5 / 8, 2 / 8, 1 / 8])
    ids, found = chunked_top_logprobs(head, logits, 1, 1.0, among=2)
    assert ids.tolist() == [[1]], "token 2 is known to this model alone"
    assert found.exp()[0].tolist() == pytest.approx([2 / 8, 6 / 8])


@pytest.mark.parametrize("rows", [5, 64])
@pytest.mark.parametrize("linear", [False, True])
def test_values_and_gradients_are_those_of_full_logits(linear: bool, rows: int) -> None:
    """A token that stands twice among the ids of a place counts in the rest once."""
    head, layer = a_head(linear=linear, bias=True)
    hidden_RH, _ = inputs()
    generator = torch.Generator().manual_seed(2)
    ids_RK = torch.randint(0, V, (R, K), generator=generator)
    ids_RK[3, 4] = ids_RK[3, 1]
    weights_RJ = torch.randn(R, K + 1, generator=generator, dtype=torch.float64)
    leaves = hidden_RH, *layer.parameters()
    found, expected = chunked_logprobs_at(head, hidden_RH, ids_RK, TEMPERATURE, rows), full(layer(hidden_RH), ids_RK)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    slopes = [torch.autograd.grad((weights_RJ * of).sum(), leaves) for of in (found, expected)]
    for slope, other in zip(*slopes, strict=True):
        torch.testing.assert_close(slope, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("among", [None, 7, V])
def test_the_likeliest_tokens_are_found_with_ties(among: int | None) -> None:
    """Four distinct logits in each row, so that most tokens are as likely as others."""
    head = Head(lambda hidden: hidden, (), linear=False)
    logits_RV = torch.randn(R, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits_RV = logits_RV[:, torch.arange(V) * 7 % 4]
    for count in (1, K, V if among is None else among):
        ids_RK, logprobs_RJ = chunked_top_logprobs(head, logits_RV, count, TEMPERATURE, 4, among=among)
        assert torch.equal(ids_RK, first(logits_RV[:, :among], count))
        torch.testing.assert_close(logprobs_RJ[:, :-1], full(logits_RV, ids_RK)[:, :-1])
        torch.testing.assert_close(logprobs_RJ.exp().sum(-1), torch.ones(R, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_rest_of_nothing_has_no_gradient_of_its_own(dtype: torch.dtype) -> None:
    """All tokens; and one that has all but 1e-87 of the probability. Neither is infinite, nor what follows of it."""
    head, layer = a_head(linear=True, bias=False, dtype=dtype)
    hidden_RH, targets_R = inputs(dtype)
    ids_RK, logprobs_RJ = chunked_top_logprobs(head, hidden_RH, V, 1.0)
    least = math.log(torch.finfo(logprobs_RJ.dtype).tiny) / 2
    assert logprobs_RJ[:, -1].tolist() == pytest.approx([least] * R)
    with torch.no_grad():
        layer.weight[targets_R[0]] = 200 * hidden_RH[0] / hidden_RH[0].float().square().sum()
    for ids in (ids_RK, targets_R[:1, None].expand(R, 1)):
        found = chunked_logprobs_at(head, hidden_RH, ids, 1.0)
        (gradient,) = torch.autograd.grad((found.exp() * (found + 40)).sum(), hidden_RH)
        assert found.isfinite().all()
        assert gradient.isfinite().all()
