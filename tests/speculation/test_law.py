"""The law of what is drawn behind drafts: chi-square of 20,000 samples of three tokens of a Markov chain.

The rule is that of the engine (`drawing.accepted` over `sampler.sample`). Beside it stands a rule in use elsewhere,
which accepts a guess of q with probability min(1, p / q) and draws from p where it does not (and not from what q lacks
of p): the same test finds it out.

Shapes: N samples, V tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from plait.generation.drawing import accepted
from plait.generation.sampler import SamplingRows, sample
from plait.generation.settings import Sampling
from plait.kernels import noise
from tests.cases import slow_but

NUM, VOCABULARY, LENGTH = 20_000, 5, 3
LOGITS_VV = torch.tensor(
    [
        [2.0, 0.5, 0.0, -1.0, 1.0],
        [0.1, 0.0, 1.5, 0.3, -0.5],
        [1.0, -2.0, 0.2, 2.5, 0.0],
        [0.1, 0.2, 0.3, 0.4, 0.5],
        [-1.0, 3.0, 0.0, 0.2, 1.0],
    ]
)
"""Logits of the next token, by the last one; the first follows token 0."""
GUESSED_VV = torch.roll(LOGITS_VV, 1, dims=1) * 0.5 + 0.5 * LOGITS_VV
"""What a drafter believes: wrong."""
KEYS_N = torch.arange(NUM) * 7919 + 13


def drawn(states_N: Tensor, place: int, sampling: Sampling, logits_VV: Tensor = LOGITS_VV) -> Tensor:
    """What the samples draw at a place behind these tokens."""
    rows = SamplingRows.of([sampling] * NUM, VOCABULARY, torch.device("cpu"))
    return sample(logits_VV[states_N], noise.draw_keys(KEYS_N, torch.full((NUM,), place)), rows)[0]


def by_noise(states_N: Tensor, place: int, sampling: Sampling) -> Tensor:
    """A drafter that knows the noise, and draws by its wrong belief, as a draft model does."""
    return drawn(states_N, place, sampling, GUESSED_VV)


def at_random(states_N: Tensor, place: int, sampling: Sampling) -> Tensor:
    return torch.from_numpy(np.random.default_rng(place).integers(0, VOCABULARY, NUM))


def always_three(states_N: Tensor, place: int, sampling: Sampling) -> Tensor:
    return torch.full((NUM,), 3)


def speculated(drafter: Callable[[Tensor, int, Sampling], Tensor], sampling: Sampling) -> tuple[np.ndarray, float]:
    """Three tokens of each sample [N, 3], by steps that verify guesses of two tokens; tokens of the first step."""
    said: list[list[int]] = [[] for _ in range(NUM)]
    first = 0.0
    while any(len(tokens) < LENGTH for tokens in said):
        place = np.array([len(tokens) for tokens in said])
        for at in sorted(set(place[place < LENGTH].tolist())):
            last_N = torch.tensor([tokens[-1] if tokens else 0 for tokens in said])
            guess_N = drafter(last_N, at, sampling)
            further_N = drafter(guess_N, at + 1, sampling)
            rows = [drawn(last_N, at, sampling), drawn(guess_N, at + 1, sampling), drawn(further_N, at + 2, sampling)]
            token_ids = torch.stack(rows, 1)
            drafts = {(n, 0): (int(guess_N[n]), int(further_N[n])) for n in range(NUM)}
            ranges = accepted([(n, 0) for n in range(NUM)], drafts, token_ids.flatten().tolist())
            for n, (start, stop) in enumerate(ranges):
                if place[n] == at:
                    said[n] += token_ids[n, : stop - start].tolist()
            first = first or sum(map(len, said)) / NUM
    return np.array([tokens[:LENGTH] for tokens in said]), first


def lossy() -> np.ndarray:
    """Guesses of q, accepted with min(1, p / q); else a draw from p."""
    rng = np.random.default_rng(4)
    p_VV, q_VV = LOGITS_VV.softmax(-1).double().numpy(), GUESSED_VV.softmax(-1).double().numpy()

    def pick(probs_NV: np.ndarray) -> np.ndarray:
        return (probs_NV.cumsum(1) < rng.random((NUM, 1))).sum(1).clip(max=VOCABULARY - 1)

    last, columns = np.zeros(NUM, int), []
    for _ in range(LENGTH):
        guess, plain = pick(q_VV[last]), pick(p_VV[last])
        accept = rng.random(NUM) < p_VV[last, guess] / q_VV[last, guess]
        last = np.where(accept, guess, plain)
        columns.append(last)
    return np.stack(columns, 1)


def law(sampling: Sampling) -> np.ndarray:
    """Probabilities of all [V, V, V] responses, by hand."""
    kept_VV = np.zeros((VOCABULARY, VOCABULARY))
    for state, logits in enumerate(LOGITS_VV.double().numpy() / sampling.temperature):
        probs = np.exp(logits - logits.max())
        probs /= probs.sum()
        order = np.argsort(-probs)
        if sampling.top_k:
            order = order[: sampling.top_k]
        mass = probs[order].cumsum() / probs[order].sum()
        order = order[: int((mass < sampling.top_p).sum()) + 1]
        kept_VV[state, order] = probs[order] / probs[order].sum()
    return np.einsum("a,ab,bc->abc", kept_VV[0], kept_VV, kept_VV)


def deviation(said_N3: np.ndarray, law_VVV: np.ndarray) -> float:
    """Chi-square over the responses that are expected often enough, in standard deviations of it; infinite where a
    response that cannot be is among them."""
    counts = np.zeros(law_VVV.shape)
    np.add.at(counts, tuple(said_N3.T), 1)
    if counts[law_VVV == 0].any():
        return math.inf
    expected = law_VVV * len(said_N3)
    often = expected >= 5
    chi = ((counts - expected)[often] ** 2 / expected[often]).sum()
    df = int(often.sum()) - 1
    return (chi - df) / math.sqrt(2 * df)


SAMPLINGS = {"whole": Sampling(), "top-p": Sampling(temperature=0.7, top_p=0.9), "top-k": Sampling(top_k=3)}
DRAFTERS = (by_noise, at_random, always_three)
QUICK = ((by_noise, "whole"), (at_random, "top-p"), (always_three, "top-k"))


@pytest.mark.parametrize(("drafter", "name"), slow_but(QUICK, itertools.product(DRAFTERS, SAMPLINGS)))
def test_the_law_is_that_of_plain_sampling(drafter, name: str) -> None:
    sampling = SAMPLINGS[name]
    said_N3, first = speculated(drafter, sampling)
    assert abs(deviation(said_N3, law(sampling))) < 4
    assert first > 1.5 or drafter is not by_noise, (
        "a drafter that knows the noise is often right, though its belief is wrong"
    )


def test_a_rule_that_is_not_lossless_is_found_out() -> None:
    assert deviation(lossy(), law(Sampling())) > 50
