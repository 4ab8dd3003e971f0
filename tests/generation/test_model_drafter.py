"""A draft model behind the engine: it changes no token, and drafts as well as it knows the policy."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from plait.data import host_device
from plait.generation import draft_steps, forward
from plait.generation.engine import Engine
from plait.generation.model_drafter import ModelDrafter
from plait.generation.pool import KVPool
from plait.generation.ragged import RaggedBatch
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.generation.speculator import Speculator, model_drafter
from plait.kernels.draft_lookup import CELLS
from plait.layout.mesh import Layout
from plait.models.language_model import LanguageModel
from plait.models.parallel.peers import Peers
from plait.schedule.work import to_the_end
from plait.speculation.drafter import Asked, DraftTokens
from plait.speculation.speculation import How
from plait.workers.sample_mover import End, SampleMover
from tests.cases import slow_but
from tests.generation.requests import with_head
from tests.generation.scripted_drafter import ScriptedDrafter
from tests.generation.test_drafts import drained
from tests.generation.test_engine import requests
from tests.generation.test_speculator import ASKED, needs_vectors
from tests.models.tiny import VOCAB_SIZE, tiny_model
from tests.training.exact import ExactFloat64

SURE = np.ones(int(np.prod(CELLS)))
LONG = [with_head(uid, 20 + uid, [40]) for uid in range(3)]
"""At temperature 1, with no stop but their lengths."""


def drafter_of(
    model: LanguageModel, num_blocks: int = 256, most_tokens: int = 4096, *, ahead: bool = False
) -> ModelDrafter:
    """
    Args:
        ahead: its CPU is taken for a device that computes behind.
    """
    with mock.patch.object(draft_steps, "computes_behind", return_value=ahead):
        return model_drafter(model, vocabulary=VOCAB_SIZE, num_blocks=num_blocks, most_tokens=most_tokens)


def speculates(drafter: ModelDrafter, how: How = 4) -> Speculator:
    """Nothing is looked up beside it."""
    return Speculator(how, ScriptedDrafter(lambda said, most: []), drafter)


def perturbed(share: float) -> LanguageModel:
    """The policy of these tests, with so much noise in each weight."""
    model = tiny_model("llama")
    generator = torch.Generator().manual_seed(3)
    model.weights += (
        share * model.weights.std() * torch.randn(model.weights.shape, generator=generator, dtype=model.weights.dtype)
    )
    return model


def acceptance(model: LanguageModel, asked: list[Request], least: int = 50, *, ahead: bool = False) -> float:
    """Share of drafts of two tokens that are taken; more than so many are tried."""
    speculator = speculates(drafter_of(model, ahead=ahead), 2)
    with ExactFloat64():
        drained(Engine(tiny_model("llama"), SamplingSettings(), speculates=speculator), asked)
    counts = speculator.counts
    assert counts.tried_of.sum() == counts.tried_of[3] > least, "all drafts are those of the model"
    return float(counts.accepted_of[3] / counts.tried_of[3])


@pytest.mark.parametrize(
    ("ahead", "samplings"),
    [(False, [Sampling(), Sampling(temperature=0.0)]), (True, [Sampling(temperature=0.7, top_k=9, top_p=0.8)])],
)
def test_the_policy_itself_is_always_right(ahead: bool, samplings: list[Sampling]) -> None:
    """It draws with the noise of the sample: at temperature 1, greedily, and with filters."""
    for sampling in samplings:
        asked = [replace(LONG[0], sampling=sampling)]
        assert acceptance(tiny_model("llama"), asked, least=20, ahead=ahead) == 1.0


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
    ("kind", "settings", "ahead"),
    slow_but([(LIKE, SETTINGS[1], True)], itertools.product((LIKE, UNLIKE), SETTINGS, (False, True))),
    ids=str,
)
def test_it_changes_no_token(kind: str, settings: dict, ahead: bool) -> None:
    """Drafts that are taken, and in a pool that preempts those that are not; read at once, or when all are drawn.

    Stops by token, string and limit; filters; greedy samples; chunks, preemption, cached prefixes."""
    model = tiny_model("llama")
    drafts = perturbed(0.02) if kind == LIKE else tiny_model("qwen3", seed=2)
    with ExactFloat64():
        plain, steps = drained(Engine(model, SamplingSettings(**settings)), requests())
        most_tokens = settings.get("max_prefill_tokens", 4096)
        drafter = drafter_of(drafts, num_blocks=16, most_tokens=most_tokens, ahead=ahead)
        speculator = speculates(drafter)
        found, fewer = drained(Engine(model, SamplingSettings(**settings), speculates=speculator), requests())
    assert found.keys() == plain.keys()
    for uid, sample in found.items():
        assert (sample.token_ids, sample.finish_reason) == (plain[uid].token_ids, plain[uid].finish_reason)
        assert sample.logprobs == pytest.approx(plain[uid].logprobs, abs=1e-9)
    counts = speculator.counts
    assert 0 < counts.drafted >= counts.accepted, "also beside prompts"
    assert counts.rows >= counts.tried_at[0]
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


def counted(drafter: ModelDrafter, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Is filled with the numbers of tokens that it computes."""
    module, counts = drafter.steps.forward.module, []
    compute = module.compute

    def counting(batch: RaggedBatch, pool: KVPool) -> torch.Tensor | None:
        counts.append(batch.num_tokens)
        return compute(batch, pool)

    monkeypatch.setattr(module, "compute", counting)
    return counts


def asked_of(slots: list[int], limits: list[int], temperature: float = 0.0) -> Asked:
    count = len(slots)
    return Asked(
        np.array(slots),
        np.arange(count).astype(np.uint64),
        np.ones(count, np.int64),
        np.full(count, temperature == 0),
        np.array(limits),
        [Sampling(temperature=temperature)] * count,
    )


def asked_for(drafter: ModelDrafter, slots: list[int], limit: int = 8, most: int = 3) -> list[list[int]]:
    """Drafts of at most so many tokens for these slots, greedy."""
    found = drafter.propose(asked_of(slots, [limit] * len(slots)), most, SURE, 0.0)
    return [row[:length].tolist() for row, length in zip(found.token_ids_BK, found.lengths_B, strict=True)]


def said(drafter: ModelDrafter, slot: int, *token_ids: int) -> None:
    count = len(token_ids)
    drafter.say(np.array([slot]), np.array([count]), np.array(token_ids), np.ones(count))


@pytest.mark.parametrize("ahead", [False, True])
def test_samples_of_a_prompt_share_what_it_holds_of_it(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two whole blocks of a prompt of 40 tokens once, the 8 behind them and a token of its own for each sample; then
    two tokens of each draft."""
    drafter = drafter_of(tiny_model("llama"), most_tokens=20, ahead=ahead)
    counts = counted(drafter, monkeypatch)
    for slot in range(3):
        drafter.begin(slot, tuple(range(5, 45)))
        said(drafter, slot, 7 + slot)
    asked_for(drafter, [0, 1, 2])
    assert sum(counts) == 32 + 3 * 9 + 3 * 2


def test_what_it_has_to_catch_up_with_has_its_whole_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tokens that of a forward of their own; few what the first step takes longer, which is none that is replayed
    where they are more than one. A token takes 1 s in a step; other forwards take 100, and 10 for each."""
    drafter = drafter_of(tiny_model("llama"))
    monkeypatch.setattr(drafter.steps.seconds, "of_step", lambda num_rows, context: float(num_rows))
    monkeypatch.setattr(drafter.steps.seconds, "of_other", lambda num_rows, context: 100.0 + 10 * num_rows)
    for slot, length in enumerate((4, 4, 9, 40)):
        drafter.begin(slot, tuple(range(5, 5 + length)))
        said(drafter, slot, 8)
    asked_for(drafter, [0, 1], most=1)
    said(drafter, 0, 3)
    said(drafter, 1, 3, 4)
    few, many = 100.0 + 10 * (1 + 9), 100.0 + 10 * 40
    for slots, catch_up_s in (([0], 0.0), ([1], 1.0), ([2], few - 1), ([3], many), ([0, 1, 2, 3], few + 40 - 4 + many)):
        assert drafter.seconds_of(np.array(slots)) == (catch_up_s, float(len(slots)))


def test_samples_whose_prompts_begin_alike_share_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of three prompts of 60 tokens once, and the 28 behind them for each, of which a block is whole."""
    drafter = drafter_of(tiny_model("llama"))
    counts = counted(drafter, monkeypatch)
    for slot in range(3):
        drafter.begin(slot, (*range(5, 40), *range(100 + slot, 125 + slot)))
        said(drafter, slot, 7)
    asked_for(drafter, [0, 1, 2])
    assert sum(counts) == 32 + 3 * 29 + 3 * 2
    drafter.begin(3, (*range(5, 40), 9))
    said(drafter, 3, 7)
    asked_for(drafter, [3])
    assert sum(counts) == 32 + 3 * 29 + 3 * 2 + 5 + 2


@pytest.mark.parametrize("ahead", [False, True])
def test_what_came_true_is_not_computed_again(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two of three draft tokens were computed, to draft the next ones behind them."""
    drafter = drafter_of(tiny_model("llama"), ahead=ahead)
    counts = counted(drafter, monkeypatch)
    drafter.begin(0, (5, 6, 7))
    said(drafter, 0, 8)
    (draft,) = asked_for(drafter, [0])
    for token_ids, behind in ((draft, 1), ((9, 9), 2), ((draft[0] + 1,), 1)):
        said(drafter, 0, *token_ids)
        counts.clear()
        again = asked_for(drafter, [0])
        assert sum(counts) == behind + 2
        fresh = drafter_of(tiny_model("llama"))
        fresh.begin(0, (5, 6, 7))
        said(fresh, 0, *drafter._texts[0].token_ids[3:])
        assert asked_for(fresh, [0]) == again
        draft = again[0]


@pytest.mark.parametrize("least", [0.0, 0.3])
def test_drafts_are_the_same_read_at_once_or_when_all_are_drawn(least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut by their limits, and where they are unlikely: before the next token is drawn, or afterwards. Then what came
    true of all that was drawn is known, and the host waits once."""
    reads = Counter[bool]()
    cut = np.random.default_rng(5).uniform(0.4, 1.0, len(SURE))
    texts = [tuple(range(5, 9)), tuple(range(20, 60)), tuple(range(7, 30)), tuple(range(5, 25))]
    found: dict[bool, list[DraftTokens]] = {}
    for ahead in (False, True):
        monkeypatch.setattr(
            draft_steps, "downloading", lambda *drawn, a=ahead: (reads.update([a]), host_device.downloading(*drawn))[1]
        )
        drafter = drafter_of(tiny_model("llama"), ahead=ahead)
        for slot, text in enumerate(texts):
            drafter.begin(slot, text)
            said(drafter, slot, 8)
        found[ahead] = []
        for count in (5, 2, 0):
            drafts = drafter.propose(asked_of([0, 1, 2, 3], [9, 3, 1, 6], 1.0), 5, cut, least)
            found[ahead].append(drafts)
            for slot, (ids, length) in enumerate(zip(drafts.token_ids_BK, drafts.lengths_B, strict=True)):
                said(drafter, slot, *ids[: min(count, length)].tolist(), 3)
    for once, later in zip(found[False], found[True], strict=True):
        for name, array in vars(once).items():
            np.testing.assert_allclose(getattr(later, name), array, rtol=1e-6, err_msg=name)
        assert once.lengths_B.tolist() == [5, 3, 1, 5] if least == 0 else once.lengths_B.max() < 5
    assert reads[True] == 3 < reads[False]


def test_who_finds_no_room_is_not_drafted_for() -> None:
    """Three blocks: one sample of two blocks, or two of one."""
    drafter = drafter_of(tiny_model("llama"), num_blocks=3)
    for slot, length in enumerate((20, 4, 4, 400)):
        drafter.begin(slot, tuple(at % 50 for at in range(length)))
        said(drafter, slot, 8)
    drafts = asked_for(drafter, [0, 1, 2, 3])
    assert [len(draft) for draft in drafts] == [3, 3, 0, 0], "the last is longer than the model's positions"
    assert [len(draft) for draft in asked_for(drafter, [2, 1])] == [3, 3], "who is not asked for gives way"
    assert [len(draft) for draft in asked_for(drafter, [0], limit=2)] == [2]
    for slot in range(4):
        drafter.end(slot)
    assert drafter.num_bytes == 0


def test_a_shorter_draft_gives_no_room_that_a_longer_one_took() -> None:
    """Two blocks: a draft of three tokens behind 15 takes both, and one of one token holds them still."""
    drafter = drafter_of(tiny_model("llama"), num_blocks=2)
    for slot, length in enumerate((14, 4)):
        drafter.begin(slot, tuple(range(5, 5 + length)))
        said(drafter, slot, 8)
    assert [len(draft) for draft in asked_for(drafter, [0])] == [3]
    assert [len(draft) for draft in asked_for(drafter, [0, 1], most=1)] == [1, 0]


def test_tokens_that_it_does_not_have_end_its_drafts() -> None:
    drafter = drafter_of(tiny_model("llama", vocab_size=300))
    drafter.begin(0, (5, 6, 7))
    said(drafter, 0, 299)
    assert len(asked_for(drafter, [0])[0]) == 3
    said(drafter, 0, 300)
    assert asked_for(drafter, [0]) == [[]]
