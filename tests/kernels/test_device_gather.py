"""Keys laid out for sequences, and their gradients added up, against torch: on a GPU where there is one, else by
Triton's interpreter. Without triton these are skipped."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plait.kernels import device_gather
from plait.models.compute.flash_plan import FlashPlan
from tests import warm
from tests.models.compute import flash_stand_in
from tests.models.compute.test_attention import a_batch

pytest.importorskip("triton", reason="triton is not installed: keys of GPUs are not laid out")

pytestmark = [pytest.mark.cuda] if warm.HAS_GPU else []
WHERE = "cuda" if warm.HAS_GPU else "cpu"

SHARED = a_batch((3, [2, 0, 4]), (1, [1] * 12), (2, []), root=3)
"""Prompts and a root of up to 18 places each, which is more than are added at a time."""


def table() -> device_gather.GatherTable:
    found = FlashPlan.of(SHARED, 2, flash_stand_in.STAND_IN).table
    assert found is not None
    return device_gather.GatherTable(*(column.to(WHERE) for column in vars(found).values()))


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(WHERE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "size"), [(1, 8), (3, 40), (2, 128)])
def test_they_say_what_torch_says(heads: int, size: int, dtype: torch.dtype) -> None:
    """Keys by token, values by head: as they may come."""
    there = table()
    key = drawn(SHARED.num_tokens, heads, size, dtype=dtype)
    value = drawn(heads, SHARED.num_tokens, size, dtype=dtype, seed=1).transpose(0, 1)
    found, expected = (module.gathered(key, value, there) for module in (device_gather, flash_stand_in))
    assert all(one.equal(other) and one.is_contiguous() for one, other in zip(found, expected, strict=True))
    grads = [drawn(len(there.token_K), heads, size, dtype=dtype, seed=seed) for seed in (2, 3)]
    sums = device_gather.folded(grads[0], grads[1].transpose(0, 1).contiguous().transpose(0, 1), there)
    wide = flash_stand_in.folded(*(grad.double() for grad in grads), there)
    for one, other in zip(sums, wide, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, atol=2e-6, rtol=1e-5 if dtype == torch.float32 else 8e-3)


def test_gradients_of_a_token_are_added_in_float32() -> None:
    """Of 18 places of the root: 256 and 17 times 1, which bfloat16 would lose one by one."""
    there = table()
    grads = torch.zeros(len(there.token_K), 1, 8, device=WHERE, dtype=torch.bfloat16)
    places = (there.token_K == 0).nonzero()[:, 0]
    grads[places] = 1.0
    grads[places[0]] = 256.0
    key, value = device_gather.folded(grads, grads, there)
    assert len(places) == 18
    assert (key[0] == 272.0).all(), "273 lies between two numbers of bfloat16, and goes to the even one"
    assert (value == key).all()
    assert not key[3:].any()
