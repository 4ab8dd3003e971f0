"""Experts that a rank has whole: what two or three ranks compute adds up to what one computes."""

from __future__ import annotations

import copy
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from plait.models.parallel.whole_experts import OwnExperts, keep_experts, whole_experts
from plait.models.scalar_loading import scalar_of
from tests.models.tiny import tiny, tiny_model
from tests.reallocation.live_memory import LiveMemory

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


@pytest.mark.parametrize("width", [96, 256])
@pytest.mark.parametrize("bounds", [(0, 4), (0, 2), (3, 4)], ids=str)
def test_what_passes_without_a_backward_is_as_large_on_every_rank(bounds: tuple[int, int], width: int) -> None:
    """Rows of all pairs, as forecasts have it (`cost.experts.passing_elements`), and masks: of a hidden size of 256,
    1,024 numbers of a pair where experts have 96 columns, 1,280 where they have 256."""
    experts = experts_of("qwen3_moe", dtype=torch.bfloat16, hidden_size=256, moe_intermediate_size=width)
    draw = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(128, 256, dtype=torch.bfloat16, generator=draw)
    chosen_TK = torch.rand(128, 4, generator=draw).argsort(-1)[:, :2]
    weights_TK = torch.rand(128, 2, dtype=torch.bfloat16, generator=draw)
    part = part_of(experts, *bounds)
    part._is_expert_parallel = True
    given = {"hidden": hidden_TH, "chosen": chosen_TK, "weights": weights_TK, **part.state_dict()}
    with torch.no_grad(), LiveMemory(given) as live:
        part(hidden_TH, chosen_TK, weights_TK)
    expected = 128 * 2 * 2 * max(4 * 256, 256 + 4 * width)
    assert expected <= live.peak_bytes <= 1.03 * expected


def test_a_family_without_grouped_products_asks_for_numbers() -> None:
    """On a GPU, too: Step-3.7 has a loop over experts, and no configuration beside them."""
    sizes = {"num_local_experts": 4, "hidden_size": 32, "moe_intermediate_size": 24, "hidden_act": "silu"}
    experts = Step3p7Experts(SimpleNamespace(**sizes)).double()
    for number, param in enumerate(experts.parameters()):
        torch.nn.init.normal_(param, generator=torch.Generator().manual_seed(number))
    parts = [part_of(experts, *bounds) for bounds in ((0, 3), (3, 4))]
    for part in parts:
        part._is_expert_parallel = True
    with torch.no_grad():
        near(sum(part(*routed()) for part in parts), experts(*routed()))


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
