"""Experts that a rank has whole: what two or three ranks compute adds up to what one computes."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.models.parallel.whole_experts import OwnExperts, keep_experts, whole_experts
from plait.models.scalar_loading import scalar_of
from tests.models.tiny import tiny, tiny_model

CUTS = [(0, 2, 4), (0, 1, 3, 4), (0, 4)]
TOKENS = 7


def experts_of(family: str, **options: Any) -> Any:
    module = tiny(family, **options)
    return next(layer for name, layer in module.named_modules() if name.endswith(".experts")).requires_grad_(True)


def part_of(experts: Any, first: int, stop: int) -> Any:
    """A copy that has the experts [first, stop) alone."""
    own = copy.deepcopy(experts)
    for name, param in list(own.named_parameters()):
        setattr(own, name, torch.nn.Parameter(param.detach()[first:stop].clone()))
    keep_experts(own, first, stop)
    return own


def routed(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [7, 32], experts [7, 2] of four and their weights; nobody goes to expert 1."""
    draw = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(TOKENS, 32, dtype=dtype, generator=draw).requires_grad_(True)
    chosen_TK = torch.tensor([[0, 2], [3, 0], [2, 3], [0, 3], [3, 2], [2, 0], [0, 2]])
    weights_TK = torch.rand(TOKENS, 2, dtype=dtype, generator=draw).requires_grad_(True)
    return hidden_TH, chosen_TK, weights_TK


FORMS = ["qwen3_moe", "gpt_oss", "nemotron_h"]
"""Gate and up in one; the same transposed, side by side, with biases; without a gate."""


@pytest.mark.parametrize("bounds", CUTS, ids=str)
@pytest.mark.parametrize("family", FORMS)
def test_parts_add_up_to_the_whole(family: str, bounds: tuple[int, ...]) -> None:
    """Outputs, and gradients of what enters and of each expert; a rank whose experts get no token has gradients of 0.
    To 1e-13 of the largest number."""
    experts = experts_of(family)
    hidden_TH, chosen_TK, weights_TK = routed()
    whole_TH = experts(hidden_TH, chosen_TK, weights_TK)
    direction_TH = torch.linspace(-1, 1, whole_TH.numel(), dtype=torch.float64).view_as(whole_TH)
    of_whole = torch.autograd.grad(whole_TH, [hidden_TH, weights_TK, *experts.parameters()], direction_TH)
    parts = [part_of(experts, first, stop) for first, stop in pairwise(bounds)]
    outputs = [part(hidden_TH, chosen_TK, weights_TK) for part in parts]
    of_parts = [
        torch.autograd.grad(out_TH, [hidden_TH, weights_TK, *part.parameters()], direction_TH)
        for out_TH, part in zip(outputs, parts, strict=True)
    ]
    near(sum(outputs), whole_TH)
    for place, expected in enumerate(of_whole[:2]):
        near(sum(grads[place] for grads in of_parts), expected)
    for place, expected in enumerate(of_whole[2:], 2):
        near(torch.cat([grads[place] for grads in of_parts]), expected)


def near(found: Any, expected: Tensor) -> None:
    assert (found - expected).detach().abs().max() <= 1e-13 * expected.detach().abs().max()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_what_a_gpu_generates_by_asks_for_no_number(family: str) -> None:
    """Pairs of others go in without weight: the same outputs by grouped products, also of a rank without a token."""
    experts = experts_of(family, dtype=torch.float32)
    hidden_TH, chosen_TK, weights_TK = routed(torch.float32)
    for first, stop in ((0, 2), (1, 2), (2, 4)):
        part = part_of(experts, first, stop)
        own: OwnExperts = part.forward
        with torch.no_grad():
            expected_TH = own.by_pairs(hidden_TH, chosen_TK, weights_TK)
            part._is_expert_parallel = True
            found_TH = part(hidden_TH, top_k_index=chosen_TK, top_k_weights=weights_TK)
            part.config._experts_implementation = "eager"
            asked_TH = part(hidden_TH, chosen_TK, weights_TK)
        assert torch.allclose(found_TH, expected_TH, rtol=1e-5, atol=1e-6)
        assert torch.allclose(asked_TH, expected_TH, rtol=1e-5, atol=1e-6)


def test_sums_are_made_in_float32() -> None:
    """1 and twice 2^-8 of three experts, in bfloat16, which has 8 bits: one after another the small ones would be lost;
    their sum is 1 + 2^-7."""
    given = torch.tensor([[1.0], [2**-8], [2**-8]], dtype=torch.bfloat16)

    class Given(torch.nn.Module):
        def forward(self, hidden: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
            return given[numbers[:, 0]]

    one = torch.ones(1, 1, dtype=torch.bfloat16)
    out = OwnExperts(Given(), 0, 3).by_pairs(one, torch.arange(3)[None], torch.ones(1, 3, dtype=torch.bfloat16))
    assert out.item() == 1 + 2**-7
    assert (given[0] + given[1] + given[2]).item() == 1.0


def test_a_copy_computes_with_its_own_weights() -> None:
    part = part_of(experts_of("qwen3_moe"), 0, 2)
    twin = copy.deepcopy(part)
    with torch.no_grad():
        for param in part.parameters():
            param.zero_()
        assert part(*routed()).abs().max() == 0
        assert twin(*routed()).abs().max() > 0


@pytest.mark.parametrize(
    ("family", "options", "is_whole"),
    [
        ("qwen3_moe", {}, True),
        ("qwen3_moe", {"moe_intermediate_size": 32}, True),
        ("qwen3_moe", {"moe_intermediate_size": 33}, False),
        ("mixtral", {}, False),
        ("mixtral", {"intermediate_size": 32}, True),
        ("gpt_oss", {"intermediate_size": 32}, True),
        ("granitemoehybrid", {}, True),
        ("lfm2_moe", {}, True),
        ("deepseek_v3", {}, True),
        ("nemotron_h", {}, True),
        ("llama", {}, False),
    ],
    ids=str,
)
def test_experts_no_wider_than_the_model_are_whole(family: str, options: dict[str, Any], is_whole: bool) -> None:
    """Of a hidden size of 32."""
    model = tiny_model(family, **options)
    for module in (model.module, scalar_of(model.copied(), seed=0).module):
        assert bool(whole_experts(module)) == is_whole
    stacked = [param for param in model.parameters.params if ".experts." in param.name]
    assert all((param.cut, param.sections) == (0, 1) for param in stacked) == is_whole or not stacked
