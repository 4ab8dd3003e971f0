"""A draft model behind the engine: it changes no token, and guesses as well as it knows the policy."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from plait.generation import forward
from plait.generation.engine import Engine
from plait.generation.model_drafter import ModelDrafter
from plait.generation.request import Request
from plait.generation.settings import Sampling, SamplingSettings
from plait.generation.speculator import Speculator, model_drafter
from plait.kernels.draft_lookup import CELLS
from plait.layout.mesh import Layout
from plait.models.language_model import LanguageModel
from plait.models.parallel.peers import Peers
from plait.schedule.work import to_the_end
from plait.speculation.drafter import Asked
from plait.speculation.speculation import How
from plait.workers.sample_mover import End, SampleMover
from tests.cases import slow_but
from tests.generation.guessing import Guessing
from tests.generation.requests import with_head
from tests.generation.test_drafts import drained
from tests.generation.test_engine import requests
from tests.generation.test_speculator import ASKED, needs_vectors
from tests.models.tiny import VOCAB_SIZE, tiny_model
from tests.training.exact import ExactFloat64

SURE = np.ones(int(np.prod(CELLS)))
LONG = [with_head(uid, 20 + uid, [40]) for uid in range(3)]
"""At temperature 1, with no stop but their lengths."""


def drafter_of(model: LanguageModel, num_blocks: int = 256, most_tokens: int = 4096) -> ModelDrafter:
    return model_drafter(model, vocabulary=VOCAB_SIZE, num_blocks=num_blocks, most_tokens=most_tokens)


def speculates(drafter: ModelDrafter, how: How = 4) -> Speculator:
    """Nothing is looked up beside it."""
    return Speculator(how, Guessing(lambda said, most: []), drafter)


def perturbed(share: float) -> LanguageModel:
    """The policy of these tests, with so much noise in each weight."""
    model = tiny_model("llama")
    generator = torch.Generator().manual_seed(3)
    model.weights += (
        share * model.weights.std() * torch.randn(model.weights.shape, generator=generator, dtype=model.weights.dtype)
    )
    return model


def acceptance(model: LanguageModel, asked: list[Request], least: int = 50) -> float:
    """Share of guesses of two tokens that are taken; more than so many are tried."""
    speculator = speculates(drafter_of(model), 2)
    with ExactFloat64():
        drained(Engine(tiny_model("llama"), SamplingSettings(), speculates=speculator), asked)
    counts = speculator.counts
    assert counts.tried_of.sum() == counts.tried_of[3] > least, "all guesses are those of the model"
    return float(counts.accepted_of[3] / counts.tried_of[3])


def test_the_policy_itself_is_always_right() -> None:
    """It draws with the noise of the sample: at temperature 1, with filters, and greedily."""
    for sampling in (Sampling(), Sampling(temperature=0.7, top_k=9, top_p=0.8), Sampling(temperature=0.0)):
        assert acceptance(tiny_model("llama"), [replace(LONG[0], sampling=sampling)], least=20) == 1.0


@pytest.mark.slow
def test_the_more_it_is_like_the_policy_the_more_often_it_is_right() -> None:
    shares = [acceptance(model, LONG) for model in (perturbed(0.002), perturbed(0.05), tiny_model("llama", seed=7))]
    assert 1.0 > shares[0] > 0.8 > shares[1] > 0.3 > shares[2], "about 0.9, 0.5 and, of other weights, 0.1"


SETTINGS = [
    {},
    {"max_prefill_tokens": 9, "max_running": 3},
    {"kv_tokens": 96},
    {"prefix_cache_tokens": 64},
]


LIKE, UNLIKE = "like the policy", "unlike it"


@pytest.mark.parametrize(
    ("kind", "settings"),
    slow_but([(LIKE, SETTINGS[1])], itertools.product((LIKE, UNLIKE), SETTINGS)),
    ids=str,
)
def test_it_changes_no_token(kind: str, settings: dict) -> None:
    """Guesses that are taken, and in a pool that preempts those that are not.

    Stops by token, string and limit; filters; greedy samples; chunks, preemption, cached prefixes."""
    model = tiny_model("llama")
    drafts = perturbed(0.02) if kind == LIKE else tiny_model("qwen3", seed=2)
    with ExactFloat64():
        plain, steps = drained(Engine(model, SamplingSettings(**settings)), requests())
        drafter = drafter_of(drafts, num_blocks=16, most_tokens=settings.get("max_prefill_tokens", 4096))
        speculator = speculates(drafter)
        found, fewer = drained(Engine(model, SamplingSettings(**settings), speculates=speculator), requests())
    assert found.keys() == plain.keys()
    for uid, sample in found.items():
        assert (sample.token_ids, sample.finish_reason) == (plain[uid].token_ids, plain[uid].finish_reason)
        assert sample.logprobs == pytest.approx(plain[uid].logprobs, abs=1e-9)
    assert speculator.counts.drafted > 0
    assert fewer < steps or kind != LIKE
    assert drafter.num_bytes == 0, "nothing is held where no sample is in flight"


EXACT = itertools.product(["adaptive", 1, 6], [torch.float32, torch.bfloat16])


@pytest.mark.parametrize("how", ["aborted", "moved"])
def test_nothing_is_held_when_the_last_sample_has_left(how: str) -> None:
    model = tiny_model("llama")
    drafter = drafter_of(model)
    engine = Engine(model, SamplingSettings(), speculates=speculates(drafter))
    engine.add(with_head(0, 20, [40]))
    for _ in range(4):
        engine.step()
    assert drafter.num_bytes > 0
    if how == "aborted":
        [sample] = engine.abort(0)
        assert len(sample.token_ids) > 2
    else:
        target, here = Engine(model, SamplingSettings()), Layout.on((0,))
        mover = SampleMover(Peers.alone(), End(here, engine), End(here, target))
        assert to_the_end(mover.moving([(0, 0)])).keys == ((0, 0),)
    assert not engine.has_work
    assert drafter.num_bytes == 0
    assert engine.occupancy.kv_bytes == 0


@pytest.mark.parametrize(("how", "dtype"), slow_but([("adaptive", torch.float32), (6, torch.bfloat16)], EXACT), ids=str)
def test_in_exact_mode_to_the_bit(how: How, dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=dtype)
    plain, _ = drained(Engine(model, SamplingSettings(max_running=5, exact=True)), ASKED)
    speculator = speculates(drafter_of(tiny_model("llama", dtype=dtype)), how)
    engine = Engine(model, SamplingSettings(max_running=5, exact=True), speculates=speculator)
    assert drained(engine, ASKED)[0] == plain
    assert drained(engine, ASKED)[0] == plain
    assert how == "adaptive" or speculator.counts.accepted > 10


@needs_vectors
def test_by_the_compiled_forward_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "PACK_STEPS", 1)
    model, drafts = (tiny_model("llama", dtype=torch.bfloat16) for _ in range(2))
    plain, _ = drained(Engine(model, SamplingSettings(max_running=5)), ASKED)
    speculator = speculates(drafter_of(drafts), 6)
    assert drained(Engine(model, SamplingSettings(max_running=5), speculates=speculator), ASKED)[0] == plain
    counts = speculator.counts
    assert counts.accepted == counts.tried_at.sum(), "the same rows, the same bits, the same noise"


def counted(drafter: ModelDrafter) -> list[int]:
    """Is filled with the numbers of tokens that it computes."""
    compute, counts = drafter._compute, []

    def counting(new, is_read: bool):
        counts.append(sum(len(one.token_ids) for one in new))
        return compute(new, is_read)

    drafter._compute = counting
    return counts


def asked_for(drafter: ModelDrafter, slots: list[int], limit: int = 8, most: int = 3) -> list[list[int]]:
    """Guesses of at most so many tokens for these slots, greedy."""
    count = len(slots)
    asked = Asked(
        np.array(slots),
        np.arange(count).astype(np.uint64),
        np.ones(count, np.int64),
        np.ones(count, bool),
        np.full(count, limit),
        [Sampling(temperature=0.0)] * count,
    )
    found = drafter.guess(asked, most, SURE, 0.0)
    return [row[:length].tolist() for row, length in zip(found.token_ids_BK, found.lengths_B, strict=True)]


def said(drafter: ModelDrafter, slot: int, *token_ids: int) -> None:
    count = len(token_ids)
    drafter.say(np.array([slot]), np.array([count]), np.array(token_ids), np.ones(count))


def test_samples_of_a_prompt_share_what_it_holds_of_it() -> None:
    """Two whole blocks of a prompt of 40 tokens once, the 8 behind them and a token of its own for each sample; then
    two tokens of each guess."""
    drafter = drafter_of(tiny_model("llama"), most_tokens=20)
    counts = counted(drafter)
    for slot in range(3):
        drafter.begin(slot, tuple(range(5, 45)))
        said(drafter, slot, 7 + slot)
    asked_for(drafter, [0, 1, 2])
    assert sum(counts) == 32 + 3 * 9 + 3 * 2


def test_samples_whose_prompts_begin_alike_share_that() -> None:
    """Two blocks of three prompts of 60 tokens once, and the 28 behind them for each, of which a block is whole."""
    drafter = drafter_of(tiny_model("llama"))
    counts = counted(drafter)
    for slot in range(3):
        drafter.begin(slot, (*range(5, 40), *range(100 + slot, 125 + slot)))
        said(drafter, slot, 7)
    asked_for(drafter, [0, 1, 2])
    assert sum(counts) == 32 + 3 * 29 + 3 * 2
    drafter.begin(3, (*range(5, 40), 9))
    said(drafter, 3, 7)
    asked_for(drafter, [3])
    assert sum(counts) == 32 + 3 * 29 + 3 * 2 + 5 + 2


def test_what_came_true_is_not_computed_again() -> None:
    """The first two of three guessed tokens were computed, to guess the next ones behind them."""
    drafter = drafter_of(tiny_model("llama"))
    counts = counted(drafter)
    drafter.begin(0, (5, 6, 7))
    said(drafter, 0, 8)
    (guess,) = asked_for(drafter, [0])
    for token_ids, behind in ((guess, 1), ((9, 9), 2), ((guess[0] + 1,), 1)):
        said(drafter, 0, *token_ids)
        counts.clear()
        again = asked_for(drafter, [0])
        assert sum(counts) == behind + 2
        fresh = drafter_of(tiny_model("llama"))
        fresh.begin(0, (5, 6, 7))
        said(fresh, 0, *drafter._texts[0].token_ids[3:])
        assert asked_for(fresh, [0]) == again
        guess = again[0]


def test_who_finds_no_room_is_not_guessed_for() -> None:
    """Three blocks: one sample of two blocks, or two of one."""
    drafter = drafter_of(tiny_model("llama"), num_blocks=3)
    for slot, length in enumerate((20, 4, 4, 400)):
        drafter.begin(slot, tuple(at % 50 for at in range(length)))
        said(drafter, slot, 8)
    guesses = asked_for(drafter, [0, 1, 2, 3])
    assert [len(guess) for guess in guesses] == [3, 3, 0, 0], "the last is longer than the model's positions"
    assert [len(guess) for guess in asked_for(drafter, [2, 1])] == [3, 3], "who is not asked for gives way"
    assert [len(guess) for guess in asked_for(drafter, [0], limit=2)] == [2]
    for slot in range(4):
        drafter.end(slot)
    assert drafter.num_bytes == 0


def test_a_shorter_guess_gives_no_room_that_a_longer_one_took() -> None:
    """Two blocks: a guess of three tokens behind 15 takes both, and one of one token holds them still."""
    drafter = drafter_of(tiny_model("llama"), num_blocks=2)
    for slot, length in enumerate((14, 4)):
        drafter.begin(slot, tuple(range(5, 5 + length)))
        said(drafter, slot, 8)
    assert [len(guess) for guess in asked_for(drafter, [0])] == [3]
    assert [len(guess) for guess in asked_for(drafter, [0, 1], most=1)] == [1, 0]


def test_tokens_that_it_does_not_have_end_its_guesses() -> None:
    drafter = drafter_of(tiny_model("llama", vocab_size=300))
    drafter.begin(0, (5, 6, 7))
    said(drafter, 0, 299)
    assert len(asked_for(drafter, [0])[0]) == 3
    said(drafter, 0, 300)
    assert asked_for(drafter, [0]) == [[]]
