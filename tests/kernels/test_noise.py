"""The noise: hand-checked constants, the tensor form against the plain one, and its distribution."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.kernels import noise
from plait.kernels.noise import NoiseKey
from tests.kernels.plain_noise import draw_key_of, uniform_of

int64 = st.integers(-(2**63), 2**63 - 1)


def test_mix_is_the_finaliser_of_splitmix64() -> None:
    # The published test vector: the first outputs of splitmix64 seeded with 1234567.
    golden = 0x9E3779B97F4A7C15
    outputs = [noise.mix(1234567 + count * golden) for count in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(key=int64, position=st.integers(0, 10**6), token_id=st.integers(-2, 10**6))
def test_tensors_compute_the_bits_of_the_plain_functions(key: int, position: int, token_id: int) -> None:
    draw_key = draw_key_of(key, position)
    keys = noise.draw_keys(torch.tensor([key]), torch.tensor([position]))
    assert keys.tolist() == [noise.signed(draw_key)]
    assert noise.uniform(keys, token_id).tolist() == [uniform_of(draw_key, token_id)]


@given(values=st.lists(int64, min_size=1, max_size=8), place=st.integers(0, 7), other=int64)
def test_every_part_of_a_key_counts(values: list[int], place: int, other: int) -> None:
    changed = list(values)
    changed[place % len(values)] = other
    assert (noise.fold(*values) == noise.fold(*changed)) == (values == changed)
    assert noise.fold(*values) != noise.fold(*values, 0)


def test_the_fields_of_a_noise_key_are_told_apart() -> None:
    keys = [
        NoiseKey(0, 0).sample_key(0, 0),
        NoiseKey(1, 0).sample_key(0, 0),
        NoiseKey(0, 1).sample_key(0, 0),
        NoiseKey(0, 0).sample_key(1, 0),
        NoiseKey(0, 0).sample_key(0, 1),
        NoiseKey(0, 0, attempt=1).sample_key(0, 0),
    ]
    assert len(set(keys)) == 6


def kolmogorov_smirnov(values: torch.Tensor) -> float:
    """sqrt(n) times the largest distance from the uniform distribution; above 1.95 in one of 1,000 fair cases."""
    ordered = values.flatten().sort().values
    n = len(ordered)
    ranks = torch.arange(n, dtype=torch.float64)
    return math.sqrt(n) * max((ordered - ranks / n).abs().max().item(), ((ranks + 1) / n - ordered).abs().max().item())


def test_uniform_over_each_part_of_the_key() -> None:
    many = torch.arange(20_000)
    key = NoiseKey(0).sample_key(0, 0)
    over_tokens = noise.uniform(torch.tensor(noise.signed(draw_key_of(key, 0))), many)
    over_positions = noise.uniform(noise.draw_keys(torch.tensor(noise.signed(key)), many), 7)
    indices = torch.tensor([noise.signed(NoiseKey(0).sample_key(0, i)) for i in range(20_000)])
    over_samples = noise.uniform(noise.draw_keys(indices, torch.tensor(0)), 7)
    seeds = torch.tensor([noise.signed(NoiseKey(i).sample_key(0, 0)) for i in range(20_000)])
    over_seeds = noise.uniform(noise.draw_keys(seeds, torch.tensor(0)), 7)
    for values in (over_tokens, over_positions, over_samples, over_seeds):
        assert kolmogorov_smirnov(values) < 1.95
        assert 0 < values.min().item() <= values.max().item() < 1
        serial = torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1].item()
        assert abs(serial) < 4 / math.sqrt(len(values))
    for one, other in ((over_tokens, over_positions), (over_samples, over_seeds)):
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1].item()) < 4 / math.sqrt(len(one))


def test_kolmogorov_smirnov_notices_a_bias() -> None:
    fair = noise.uniform(torch.arange(20_000), 0)
    assert kolmogorov_smirnov(fair**1.06) > 1.95
