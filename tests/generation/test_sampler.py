"""The law of the draws, by chi-square against the softmax, and each draw against the plain oracle."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.supports import Supports, encoded
from plait.errors import ConfigError
from plait.generation import candidates
from plait.generation.sampler import SamplingRows, filter_threshold, sample, sample_kept, sample_plain
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels import noise, paged_attention
from tests.cases import examples, slow_but
from tests.generation import oracle

CPU = torch.device("cpu")


def rows_of(*samplings: Sampling, vocab_size: int) -> SamplingRows:
    return SamplingRows.of(samplings, vocab_size, CPU)


def noise_of(sample_keys: torch.Tensor, position: int = 0) -> noise.DrawNoise:
    """Of draws at one place in the responses of these samples."""
    return noise.DrawNoise(sample_keys, torch.full_like(sample_keys, position))


def draws(logits: torch.Tensor, sampling: Sampling, count: int, num_candidates: int) -> torch.Tensor:
    """Tokens of `count` draws from one row of logits, under keys 0, 1, 2 …"""
    keys = noise_of(torch.arange(count))
    rows = rows_of(*[sampling] * count, vocab_size=len(logits))
    return sample(logits.expand(count, -1), keys, rows, num_candidates=num_candidates)[0]


def chi_square_z(tokens: torch.Tensor, probs: list[float]) -> float:
    """Pearson's statistic in standard deviations from its mean; tokens expected fewer than 5 times are pooled."""
    expected = np.array(probs) * len(tokens)
    counts = np.bincount(tokens.numpy(), minlength=len(probs)).astype(float)
    assert counts[expected == 0].sum() == 0, "a token that was filtered out has been drawn"
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    return float((((observed - wanted) ** 2 / wanted).sum() - freedom) / math.sqrt(2 * freedom))


def law(logits: torch.Tensor, sampling: Sampling) -> list[float]:
    """The filtered softmax, in plain Python."""
    logprobs = oracle.log_softmax(logits.tolist(), sampling.temperature)
    kept = oracle.kept_tokens(logprobs, sampling.top_k, sampling.top_p, sampling.min_p)
    mass = math.fsum(math.exp(logprobs[i]) for i in kept)
    return [math.exp(lp) / mass if i in set(kept) else 0.0 for i, lp in enumerate(logprobs)]


LOGITS = torch.randn(60, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 1.5


@pytest.mark.parametrize("num_candidates", slow_but([1, 16], [1, 4, 16, 64]))
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(temperature=2.0),
        Sampling(top_k=12),
        Sampling(top_p=0.8),
        Sampling(temperature=1.5, top_k=30, top_p=0.9),
        Sampling(temperature=0.7, top_p=0.95, min_p=0.05),
    ],
    ids=str,
)
def test_frequencies_follow_the_filtered_softmax(sampling: Sampling, num_candidates: int) -> None:
    tokens = draws(LOGITS, sampling, 40_000, num_candidates)
    assert abs(chi_square_z(tokens, law(LOGITS, sampling))) < 4


def test_the_chi_square_notices_a_slightly_wrong_law() -> None:
    tokens = draws(LOGITS, Sampling(temperature=1.05), 40_000, 4)
    assert chi_square_z(tokens, law(LOGITS, Sampling())) > 4


KEPT = [
    Sampling(top_p=0.8, keeps_support=True),
    Sampling(temperature=0.7, top_k=12, keeps_support=True),
    Sampling(temperature=1.5, min_p=0.05, keeps_support=True),
    Sampling(temperature=1.2, top_k=30, top_p=0.9, min_p=0.02, keeps_support=True),
    Sampling(top_k=60, keeps_support=True),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_a_token_was_drawn_from_is_kept(dtype: torch.dtype) -> None:
    """The oracle's set and its log-prob over that; the tokens are those that are drawn without keeping it; rows beside
    it that do not keep, or are greedy, say what they said."""
    others = [
        Sampling(),
        Sampling(temperature=0.0, top_p=0.5, keeps_support=True),
        Sampling(top_p=0.8),
        Sampling(min_p=0.1),
    ]
    samplings = [*KEPT, *others] * 20
    logits = LOGITS.to(dtype).repeat(len(samplings), 1)
    numbers = noise.DrawNoise(torch.arange(len(samplings)), torch.arange(len(samplings)) % 7)
    tokens, logprobs, bits = sample_kept(logits, numbers, rows_of(*samplings, vocab_size=60))
    without = [replace(sampling, keeps_support=False) for sampling in samplings]
    assert torch.equal(sample(logits, numbers, rows_of(*without, vocab_size=60))[0], tokens)
    sets = Supports(tuple(encoded(bits.numpy(), 60)))
    for row, sampling in enumerate(samplings):
        whole = oracle.log_softmax(logits[row].tolist(), sampling.temperature or 1.0)
        kept = [*range(60)]
        if sampling.keeps_support and sampling.temperature:
            kept = sorted(oracle.kept_tokens(whole, sampling.top_k, sampling.top_p, sampling.min_p))
        mass = math.fsum(math.exp(whole[token]) for token in kept)
        assert float(logprobs[row]) == pytest.approx(whole[tokens[row]] - math.log(mass), abs=1e-5)
        found = sets.ids_n[sets.starts_R1[row] : sets.starts_R1[row + 1]].tolist()
        assert (found or [*range(60)]) == kept


def test_logits_that_are_no_numbers_are_found_where_some_are_left_out() -> None:
    logits = LOGITS.float().repeat(2, 1)
    logits[0, 7] = torch.nan
    logits[1, 7] = torch.inf
    numbers = noise.DrawNoise(torch.arange(2), torch.arange(2))
    for sampling in KEPT:
        _, logprobs, _ = sample_kept(logits, numbers, rows_of(sampling, sampling, vocab_size=60))
        assert not logprobs.isfinite().any()


def test_float32_and_equal_logits() -> None:
    # No candidate is above the 5th of 60 equal logits: all the mass is in the tail.
    tokens = draws(torch.zeros(60), Sampling(), 8_000, 4)
    assert abs(chi_square_z(tokens, [1 / 60] * 60)) < 4


def test_a_large_vocabulary_in_bfloat16() -> None:
    logits = (torch.randn(3_000, generator=torch.Generator().manual_seed(0)) * 2).bfloat16()
    tokens = draws(logits, Sampling(), 5_000, 64)
    assert abs(chi_square_z(tokens, law(logits.double(), Sampling()))) < 4
    assert (logits[tokens] < logits.topk(64).values[-1]).float().mean() > 0.2, "the tail has hardly been used"


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 20, 39, 40, 100]),
    top_p=st.sampled_from([1e-9, 0.3, 0.9, 0.999999, 1.0]),
)


@settings(max_examples=examples(30, 60), deadline=None)
@given(
    asked=st.lists(samplings, min_size=1, max_size=5),
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.1, 2.0, 8.0]),
    num_candidates=st.sampled_from([1, 2, 7, 64]),
)
def test_each_draw_is_the_oracles(asked: list[Sampling], seed: int, spread: float, num_candidates: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(asked), 40, generator=generator, dtype=torch.float64) * spread
    keys = noise_of(torch.randint(-(2**62), 2**62, (len(asked),), generator=generator))
    before = logits.clone()
    tokens, logprobs = sample(logits, keys, rows_of(*asked, vocab_size=40), num_candidates=num_candidates)
    assert torch.equal(logits, before)
    for row, sampling in enumerate(asked):
        token_id, logprob, _ = oracle.draw(logits[row].tolist(), int(keys.keys[row]), sampling, num_candidates)
        assert tokens[row] == token_id
        assert logprobs[row].item() == pytest.approx(logprob, abs=1e-12)


@settings(max_examples=examples(12, 30), deadline=None)
@given(asked=st.lists(samplings, min_size=2, max_size=6), seed=st.integers(0, 2**31))
def test_a_row_does_not_notice_the_others(asked: list[Sampling], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(len(asked), 300, generator=generator) * 3).bfloat16()  # full of ties
    keys = noise_of(torch.randint(-(2**62), 2**62, (len(asked),), generator=generator))
    tokens, _ = sample(logits, keys, rows_of(*asked, vocab_size=300))
    for row, sampling in enumerate(asked):
        alone, _ = sample(logits[row : row + 1], keys[row : row + 1], rows_of(sampling, vocab_size=300))
        assert alone.item() == tokens[row]


def test_thresholds_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    weights = (logits - logits.max()).exp()

    def kept(**filters: float) -> int:
        rows = rows_of(Sampling(**filters), vocab_size=4)
        return int((logits >= filter_threshold(logits, weights, rows)[:, None]).sum())

    assert kept(top_k=1) == 1
    assert kept(top_k=2) == 2
    assert kept(top_k=3) == 4  # the two last ones tie
    assert kept(top_p=0.5) == 1
    assert kept(top_p=0.51) == 2
    assert kept(top_p=0.76) == 4
    assert kept(top_k=2, top_p=0.66) == 1  # 0.5 of 0.75 is two thirds: renormalised between the two
    assert kept(top_k=2, top_p=0.67) == 2


def test_top_p_over_a_wide_vocabulary_looks_far_enough() -> None:
    logits = torch.randn(3, 3_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.01
    asked = [Sampling(top_p=0.01), Sampling(top_p=0.5), Sampling(top_p=0.999)]
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    threshold = filter_threshold(logits, weights, rows_of(*asked, vocab_size=3_000))
    for row, sampling in enumerate(asked):
        expected = oracle.kept_tokens(oracle.log_softmax(logits[row].tolist(), 1.0), 0, sampling.top_p)
        assert int((logits[row] >= threshold[row]).sum()) == len(expected)


def test_greedy_takes_the_lowest_id_among_equals_also_beside_sampled_rows() -> None:
    logits = torch.zeros(2, 50)
    logits[:, [7, 30]] = 3.0
    keys = noise_of(torch.tensor([5, 6]))
    for other in (Sampling(temperature=0.0), Sampling(temperature=0.5, top_p=0.5)):
        tokens, logprobs = sample(logits, keys, rows_of(Sampling(temperature=0.0), other, vocab_size=50))
        assert tokens[0] == 7
        assert logprobs[0].item() == pytest.approx(3 - math.log(48 + 2 * math.exp(3)), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["compiled", "plain"])
def test_log_probs_of_greedy_rows_are_at_the_temperature_that_is_asked_for(dtype: torch.dtype) -> None:
    """log softmax((0, ln 4, ln 2) / T): at T = 0.5 the shares are 1 : 16 : 4, at T = 1 they are 1 : 4 : 2."""
    logits = torch.tensor([[1, 4, 2]], dtype=dtype).log().expand(4, -1)
    greedy = [Sampling(temperature=0.0, greedy_logprobs_at=0.5), Sampling(temperature=0.0)]
    beside = [Sampling(temperature=0.0, greedy_logprobs_at=0.5), Sampling(temperature=2.0, top_k=1)]
    tokens, logprobs = sample(logits, noise_of(torch.arange(4)), rows_of(*greedy, *beside, vocab_size=3))
    assert tokens.tolist() == [1, 1, 1, 1]
    shares = [16 / 21, 4 / 7, 16 / 21, 2 / (1 + 2 + math.sqrt(2))]
    assert logprobs.exp().tolist() == pytest.approx(shares, abs=1e-6)


def test_broken_logits_show_in_the_logprob_and_break_nothing_else() -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    logits[1, 3] = torch.nan
    logits[2, 3] = torch.inf
    logits[3, 3] = -torch.inf  # a token that the model rules out
    for sampling in (Sampling(), Sampling(top_p=0.9), Sampling(top_k=70), Sampling(temperature=0.0)):
        rows = rows_of(*[sampling] * 4, vocab_size=100)
        tokens, logprobs = sample(logits, noise_of(torch.arange(4)), rows, num_candidates=4)
        assert logprobs.isfinite().tolist() == [True, False, False, True]
        assert ((tokens >= 0) & (tokens < 100)).all()


def test_a_rounding_of_the_logits_flips_fewer_tokens_than_an_inverse_cdf() -> None:
    logits = torch.randn(2_000, 500, generator=torch.Generator().manual_seed(0)) * 2
    keys = noise_of(torch.arange(2_000))
    rows = rows_of(*[Sampling()] * 2_000, vocab_size=500)

    def inverse_cdf(logits: torch.Tensor) -> torch.Tensor:
        cumulative = logits.double().softmax(-1).cumsum(-1)
        return torch.searchsorted(cumulative, noise.uniform(keys.keys, 0)[:, None])[:, 0]

    def flips(num_candidates: int) -> float:
        exact, rounded = (sample(x, keys, rows, num_candidates=num_candidates)[0] for x in (logits, logits.bfloat16()))
        return (exact != rounded).float().mean().item()

    assert (inverse_cdf(logits) != inverse_cdf(logits.bfloat16().float())).float().mean() > 0.05
    assert flips(256) < 0.01


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": 1e-5},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.0},
        {"min_p": -0.1},
        {"max_tokens": 0},
        {"stop": ("a", "")},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(wrong: dict) -> None:
    key = next(iter(wrong))
    with pytest.raises(ConfigError, match=key):
        replace(Sampling(), **wrong)
    with pytest.raises(ValueError, match="max_response_tokens" if key == "max_tokens" else key):
        SamplingSettings(**{"max_response_tokens" if key == "max_tokens" else key: wrong[key]})


def test_settings_become_sampling_and_import_no_torch() -> None:
    asked = SamplingSettings(temperature=0.5, top_k=3, top_p=0.9, max_response_tokens=7, stop=("x",))
    assert asked.sampling() == Sampling(temperature=0.5, top_k=3, top_p=0.9, max_tokens=7, stop=("x",))
    assert asked.sampling(temperature=0.0).temperature == 0


@pytest.mark.parametrize("vocab_size", [65, 70, 300, 515, 1000, 4096, 4111])
def test_the_top_of_the_vocabulary_is_that_of_a_full_search(vocab_size: int) -> None:
    """Ties, infinities and NaN included: the logits agree, and each id has the logit that stands beside it."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits_BV = torch.randn(12, vocab_size, generator=generator)
    logits_BV[1] = logits_BV[1].round()
    logits_BV[2] = 0.0
    logits_BV[3, 5:] = -torch.inf
    logits_BV[4] = -torch.inf
    logits_BV[5, vocab_size // 2] = torch.nan
    logits_BV[6] = torch.arange(vocab_size)
    logits_BV[7] = -torch.arange(vocab_size).float()
    for count in (1, 8, 65):
        found_BW, ids_BW = candidates.largest(logits_BV, count)
        torch.testing.assert_close(found_BW, logits_BV.topk(count).values, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(logits_BV.gather(1, ids_BW), found_BW, rtol=0, atol=0, equal_nan=True)
        assert all(len(set(ids)) == count for ids in ids_BW.tolist())


@pytest.mark.skipif(not paged_attention.AVAILABLE, reason="numba is not installed")
@settings(max_examples=examples(60, 120), deadline=None)
@given(
    asked=st.lists(samplings, min_size=1, max_size=6),
    vocab_size=st.sampled_from([1, 2, 40, 64, 65, 66, 300, 515, 4111]),
    num_candidates=st.sampled_from([1, 7, 64]),
    spread=st.sampled_from([0.0, 0.01, 2.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_the_compiled_draw_is_the_plain_one(
    asked: list[Sampling], vocab_size: int, num_candidates: int, spread: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(len(asked), vocab_size, generator=generator) * spread).to(dtype)
    logits[0, : vocab_size // 2] = -torch.inf  # tokens that the model rules out
    keys = noise_of(torch.randint(-(2**62), 2**62, (len(asked),), generator=generator))
    rows = rows_of(*asked, vocab_size=vocab_size)
    found, logprobs = sample(logits, keys, rows, num_candidates=num_candidates)
    expected, plain_logprobs = sample_plain(logits, keys.keys, rows, num_candidates=num_candidates)
    assert torch.equal(found, expected)
    torch.testing.assert_close(logprobs, plain_logprobs, rtol=1e-6, atol=4e-6)


@pytest.mark.skipif(not paged_attention.AVAILABLE, reason="numba is not installed")
@pytest.mark.parametrize("spread", slow_but([3.0], [0.5, 3.0]))
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(temperature=0.9), marks=pytest.mark.slow),
        Sampling(temperature=0.9, top_k=50, top_p=0.9),
        pytest.param(Sampling(top_k=400), marks=pytest.mark.slow),
        pytest.param(Sampling(top_p=0.95), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_of_ten_thousand_compiled_draws_none_is_another(sampling: Sampling, spread: float) -> None:
    vocab_size = examples(1_000, 3_000)
    logits = (torch.randn(10_000, vocab_size, generator=torch.Generator().manual_seed(0)) * spread).bfloat16()
    keys = noise_of(torch.arange(10_000), 3)
    rows = rows_of(*[sampling] * 1_000, vocab_size=vocab_size)
    for start in range(0, 10_000, 1_000):
        part = slice(start, start + 1_000)
        found, _ = sample(logits[part], keys[part], rows)
        assert torch.equal(found, sample_plain(logits[part], keys[part].keys, rows)[0])


@pytest.mark.skipif(not paged_attention.AVAILABLE, reason="numba is not installed")
@pytest.mark.parametrize(("filters", "most"), [({"top_k": 50, "top_p": 0.9}, 1.5), ({"top_p": 0.9}, 12.0)], ids=str)
def test_filters_cost_little(filters: dict[str, float], most: float) -> None:
    """CPU time of draws with filters, over that without: about 1.1, and 3 to 8 where top-p needs the whole row."""
    logits = torch.randn(32, 49_152, generator=torch.Generator().manual_seed(0)) * 2
    keys = noise_of(torch.arange(32))
    plain, filtered = (rows_of(*[sampling] * 32, vocab_size=49_152) for sampling in (Sampling(), Sampling(**filters)))
    ratios = []
    for _ in range(9):
        times = []
        for rows in (plain, filtered):
            sample(logits, keys, rows)
            start = time.process_time()
            for _ in range(4):
                sample(logits, keys, rows)
            times.append(time.process_time() - start)
        ratios.append(times[1] / times[0])
    assert statistics.median(ratios) < most
