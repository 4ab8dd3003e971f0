"""The draw of GPUs against the plain one: on a GPU where there is one, else by Triton's interpreter. Without triton
these are skipped."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from plait.generation.sampler import SamplingRows, sample, sample_kept, sample_plain
from plait.generation.sampling import Sampling
from plait.kernels import noise
from tests import warm
from tests.cases import slow_but
from tests.generation.test_sampler import chi_square_z, law, noise_of

triton = pytest.importorskip("triton", reason="triton is not installed: the draw of GPUs is not tested")
tl = pytest.importorskip("triton.language")
device_draw_kernels = pytest.importorskip("plait.kernels.device_draw_kernels")

pytestmark = [pytest.mark.cuda] if warm.HAS_GPU else []
WHERE = torch.device("cuda" if warm.HAS_GPU else "cpu")
ASKED = [
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=0.0),
    Sampling(temperature=1.7, top_k=30),
    Sampling(top_p=0.8),
    Sampling(temperature=0.3, top_k=200, top_p=0.9),
    Sampling(top_k=1),
]


@triton.jit
def made_keys(keys, places, out):
    """Grid (B,): the keys of draws, `out` int64 [B]."""
    row = tl.program_id(0)
    tl.store(out + row, device_draw_kernels.draw_key(keys, places, row).to(tl.int64, bitcast=True))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with small blocks; it takes any tensors. Without a GPU its kernels are interpreted
    (`tests/conftest.py`) and take tensors of a CPU."""
    from plait.kernels import device_draw, paged_attention

    monkeypatch.setattr(paged_attention, "AVAILABLE", False)
    monkeypatch.setattr(device_draw, "takes", lambda logits: True)
    monkeypatch.setattr(device_draw, "GROUP", 16)
    monkeypatch.setattr(device_draw, "BLOCK", 128)
    return device_draw


def drawn(rows: int, vocabulary: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, noise.DrawNoise]:
    """Logits, each row of which lies in a longer one; and the noise of any samples at any places."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(rows, vocabulary + 16, generator=generator) * scale
    keys = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    places = torch.randint(0, 1 << 20, (rows,), generator=generator)
    return logits.to(WHERE, dtype)[:, :vocabulary], noise.DrawNoise(keys.to(WHERE), places.to(WHERE))


def rows_of(asked: list[Sampling], rows: int, vocabulary: int) -> SamplingRows:
    return SamplingRows.of([asked[row % len(asked)] for row in range(rows)], vocabulary, WHERE)


def both(logits: Tensor, of_draws: noise.DrawNoise, rows: SamplingRows, num_candidates: int = 64) -> Tensor:
    """The tokens, which are those of the plain draw."""
    tokens, logprobs = sample(logits, of_draws, rows, num_candidates=num_candidates)
    expected, plain_logprobs = sample_plain(logits, of_draws.keys, rows, num_candidates=num_candidates)
    assert tokens.equal(expected)
    torch.testing.assert_close(logprobs, plain_logprobs, rtol=1e-6, atol=1e-5)
    return tokens


def test_keys_that_are_made_while_drawing_are_those_of_the_noise() -> None:
    """To the bit, of any sample and place."""
    edges = [0, 1, -1, 2**63 - 1, -(2**63), 0x1E3779B97F4A7C15]
    generator = torch.Generator().manual_seed(0)
    keys = torch.cat([torch.tensor(edges), torch.randint(-(2**62), 2**62, (58,), generator=generator)])
    places = torch.cat([torch.tensor([0, 1, 2, 2**31, 2**40, 151_935]), torch.arange(58)])
    out = torch.empty(64, dtype=torch.int64, device=WHERE)
    made_keys[(64,)](keys.to(WHERE), places.to(WHERE), out)
    assert out.cpu().equal(noise.draw_keys(keys, places))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", slow_but([0.01, 2.0], [0.0, 0.01, 2.0, 30.0]))
@pytest.mark.parametrize(
    ("vocabulary", "asked"),
    [(1, ASKED), (65, ASKED[:1]), (66, ASKED), (300, ASKED[:1]), (1_031, ASKED), (1_031, ASKED[1:2])],
)
def test_it_draws_what_the_plain_one_draws(
    device: ModuleType, vocabulary: int, asked: list[Sampling], scale: float, dtype: torch.dtype
) -> None:
    logits, keys = drawn(len(ASKED), vocabulary, scale, dtype)
    logits[3, : vocabulary // 2] = float("-inf")  # tokens that the model rules out
    logits[4, vocabulary // 2 + 1 :] = float("-inf")
    logits[6] = logits[6].sort().values
    both(logits, keys, rows_of(asked, len(ASKED), vocabulary))


AT_ANOTHER = Sampling(temperature=0.0, greedy_logprobs_at=0.7)


@pytest.mark.parametrize(
    "asked", [ASKED[2:3], [ASKED[0], ASKED[2]], ASKED[4:5], [AT_ANOTHER], [ASKED[4], AT_ANOTHER]], ids=str
)
def test_rows_that_are_greedy_sampled_or_filtered(device: ModuleType, asked: list[Sampling]) -> None:
    both(*drawn(4, 300, 1.0, torch.bfloat16), rows_of(asked, 4, 300))


@pytest.mark.parametrize("num_candidates", [1, 7, 16, 100])
def test_any_number_of_candidates(device: ModuleType, num_candidates: int) -> None:
    logits, keys = drawn(7, 500, 1.0, torch.bfloat16)
    both(logits, keys, rows_of(ASKED, 7, 500), num_candidates)


def test_blocks_as_they_are_on_a_gpu(device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat logits, so that tails win often; a large vocabulary that no block divides."""
    monkeypatch.setattr(device, "GROUP", 64)
    monkeypatch.setattr(device, "BLOCK", 2048)
    logits, keys = drawn(6, 20_011, 1.0, torch.bfloat16)
    tokens = both(logits, keys, rows_of(ASKED[:1], 6, 20_011))
    in_tail = logits.gather(1, tokens[:, None])[:, 0] <= logits.topk(65).values[:, -1]
    assert bool(in_tail.any())


def test_most_tokens_in_few_groups(device: ModuleType) -> None:
    """The 65 largest in neighbouring groups, and the same logit everywhere else."""
    logits, keys = drawn(4, 2_000, 1.0, torch.bfloat16)
    logits[:] = 0.0
    logits[0, 500:700] = torch.linspace(3, 9, 200).to(logits)
    logits[1, 500:564] = 1.0
    logits[2, 500:565] = 1.0
    logits[3, 500] = -0.0
    both(logits, keys, rows_of(ASKED[:1], 4, 2_000))


@pytest.mark.skipif(not warm.HAS_GPU, reason="interpreted, so many draws take hours")
@pytest.mark.parametrize("sampling", [ASKED[0], ASKED[1], ASKED[4], ASKED[5]], ids=str)
def test_frequencies_follow_the_filtered_softmax(device: ModuleType, sampling: Sampling) -> None:
    logits, _ = drawn(1, 300, 1.0, torch.float32)
    keys = noise_of(torch.arange(40_000, device=WHERE))
    rows = SamplingRows.of([sampling] * 40_000, 300, WHERE)
    tokens, _ = sample(logits.expand(40_000, -1), keys, rows, num_candidates=8)
    assert abs(chi_square_z(tokens.cpu(), law(logits[0].double().cpu(), sampling))) < 4


def test_broken_logits_show_in_the_logprob_and_break_nothing_else(device: ModuleType) -> None:
    logits, keys = drawn(5, 100, 1.0, torch.float32)
    logits[1, 3] = torch.nan
    logits[2, 3] = torch.inf
    logits[3, 3] = -torch.inf  # a token that the model rules out
    logits[4] = torch.nan
    for sampling in (Sampling(), Sampling(top_p=0.9), Sampling(top_k=70), Sampling(temperature=0.0)):
        tokens, logprobs = sample(logits, keys, rows_of([sampling], 5, 100), num_candidates=4)
        assert logprobs.isfinite().tolist() == [True, False, False, True, False]
        assert bool(((tokens >= 0) & (tokens < 100)).all())


def test_greedy_takes_the_lowest_id_among_equals_also_beside_sampled_rows(device: ModuleType) -> None:
    logits = torch.zeros(2, 50, device=WHERE)
    logits[:, [7, 30]] = 3.0
    for asked in ([Sampling(temperature=0.0)], [Sampling(temperature=0.0), Sampling(temperature=0.5, top_p=0.5)]):
        tokens = both(logits, noise_of(torch.tensor([5, 6], device=WHERE)), rows_of(asked, 2, 50))
        assert tokens[0] == 7


def test_what_filters_leave_is_drawn_from_as_by_operators(device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that keep it beside rows that do not, and one of min-p; hardly more than one token is left of some."""
    kept = [replace(sampling, keeps_support=place % 2 == 0) for place, sampling in enumerate(ASKED)]
    for asked in (kept, [replace(sampling, keeps_support=True, min_p=0.2) for sampling in ASKED]):
        logits, keys = drawn(len(asked), 1_031, 2.0, torch.bfloat16)
        rows = rows_of(asked, len(asked), 1_031)
        tokens, logprobs, bits = sample_kept(logits, keys, rows)
        with monkeypatch.context() as by_operators:
            by_operators.setattr(device, "takes", lambda logits: False)
            expected, plain_logprobs, plain_bits = sample_kept(logits, keys, rows)
        assert tokens.equal(expected)
        assert bits.equal(plain_bits)
        torch.testing.assert_close(logprobs, plain_logprobs, rtol=1e-6, atol=1e-5)
