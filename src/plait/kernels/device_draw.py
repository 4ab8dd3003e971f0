"""The draw of `generation.sampler` on a GPU, by Triton: four programs in place of some 85 operators of torch.

It draws what the plain function draws: the same candidates, the same noise, the same tail. Sums are taken in another
order and exponentials rounded otherwise, which moves a score, and the bounds between tokens of the tail, by about 1e-7
of the whole, so that a token is seldom another. No launch asks the device for a number.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.kernels.noise import DrawNoise
from plait.kernels.on_devices import AVAILABLE, power_of_two

GROUP = 64
"""Neighbouring tokens whose largest logit is found first: a line of memory of bfloat16."""
BLOCK = 2048
"""Tokens of a program that reads logits. Of 152 thousand tokens that is 75 programs for one row."""
ROW_WARPS = 8
"""Warps of a program that looks at all groups of a row."""


def takes(logits_BV: Tensor) -> bool:
    """Whether the kernels draw from these logits of any shape: bfloat16 or float32, on a GPU."""
    return AVAILABLE and logits_BV.device.type == "cuda" and logits_BV.dtype in (torch.bfloat16, torch.float32)


def draw(
    logits_BV: Tensor,
    noise_B: DrawNoise,
    num_candidates: int,
    *,
    temperature_B: Tensor | None = None,
    greedy_B: Tensor | None = None,
    all_greedy: bool = False,
    threshold_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`sampler.sample` on a GPU.

    Args:
        logits_BV: bfloat16 or float32; not changed.
        noise_B: of the draws.
        num_candidates, temperature_B (float64), greedy_B, all_greedy: as in `sampler.SamplingRows`.
        threshold_B: float32; the smallest logit over the temperature that each row keeps; None: all keep all.

    Returns:
        token_ids_B (int64) and logprobs_B (float32), as `sampler.sample`.
    """
    from plait.kernels import device_draw_kernels  # imports triton

    logits_BV = logits_BV if logits_BV.stride(1) == 1 else logits_BV.contiguous()
    noises = noise_B.sample_keys.contiguous(), noise_B.positions.contiguous()
    num_rows, vocabulary = logits_BV.shape
    device, wide = logits_BV.device, torch.float64
    num_groups, num_blocks = -(-vocabulary // GROUP), -(-vocabulary // BLOCK)
    most_kept = num_candidates if vocabulary > num_candidates + 1 else vocabulary  # else none is left out
    num_places = max(16, power_of_two(most_kept))
    maxima = torch.empty(num_rows, num_groups, dtype=logits_BV.dtype, device=device)
    lists = torch.empty(num_rows, 2, num_places, dtype=torch.int32, device=device)
    found = torch.empty(num_rows, 4, dtype=wide, device=device)
    sums = torch.empty(num_rows, 2, num_blocks, dtype=wide, device=device)
    token_ids_B = torch.empty(num_rows, dtype=torch.int64, device=device)
    logprobs_B = torch.empty(num_rows, dtype=torch.float32, device=device)
    # What no row has is not read: any tensor stands for it.
    temperature_B, scaled = (found, False) if temperature_B is None else (temperature_B, True)
    threshold_B, filtered = (logprobs_B, False) if threshold_B is None else (threshold_B, True)
    some_greedy = all_greedy or greedy_B is not None
    of_row = logits_BV, logits_BV.stride(0)
    flags = {"SCALED": scaled, "FILTERED": filtered}
    device_draw_kernels.tops[(num_rows, num_blocks)](*of_row, maxima, vocabulary, num_groups, GROUP=GROUP, N=BLOCK)
    device_draw_kernels.choose[(num_rows,)](
        *of_row, maxima, *noises, temperature_B, greedy_B if greedy_B is not None else lists, threshold_B,
        lists, found, vocabulary, num_groups, most_kept + 1,
        WIDE_G=power_of_two(num_groups), GROUP=GROUP, W=num_places,
        BITS=16 if logits_BV.dtype == torch.bfloat16 else 32, SOME_GREEDY=some_greedy, ALL_GREEDY=all_greedy, **flags,
        num_warps=ROW_WARPS,
    )  # fmt: skip
    device_draw_kernels.weigh[(num_rows, num_blocks)](
        *of_row, temperature_B, threshold_B, found, sums, vocabulary, num_blocks, N=BLOCK, **flags
    )
    device_draw_kernels.decide[(num_rows,)](
        *of_row, *noises, temperature_B, threshold_B, found, sums, token_ids_B, logprobs_B, vocabulary, num_blocks,
        WIDE_S=power_of_two(num_blocks), N=BLOCK, **flags,
    )  # fmt: skip
    return token_ids_B, logprobs_B
