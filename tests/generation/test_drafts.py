"""Several tokens of a sample in one step: draft tokens that are accepted are drawn at once, and no sample says
another."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from plait.data.records import FinishReason, Prompt, Sample
from plait.generation import forward
from plait.generation.decode_batch import DecodeBatch
from plait.generation.drawing import accepted
from plait.generation.engine import Engine, drain
from plait.generation.flight import InFlight
from plait.generation.ragged import SHORT_ROWS, ragged
from plait.generation.request import Request
from plait.generation.response import PendingPrompt, Response
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels import paged_attention
from plait.kernels.noise import NoiseKey
from plait.policy.step import Key
from tests.cases import slow_but
from tests.generation.requests import with_head
from tests.generation.test_engine import by_uid, requests
from tests.models.tiny import tiny_model, tiny_tokenizer
from tests.training.exact import ExactFloat64

FREE = Sampling(stop_token_ids=())
needs_vectors = pytest.mark.skipif(not paged_attention.fast(torch.bfloat16), reason="no numba, or a CPU without AVX2")


class Oracle:
    """Drafts what samples are known to say, and now and then something else."""

    def __init__(self, known: dict[str, Sample], share_wrong: float, most: int = SHORT_ROWS - 1) -> None:
        self.known, self.share_wrong, self.most = known, share_wrong, most
        self.random = random.Random(3)

    def drafts(self, engine: Engine) -> dict[Key, tuple[int, ...]]:
        found = {}
        for (uid, index), response in engine.state.flight.started.items():
            said = len(response.token_ids)
            length = self.random.randint(0, self.most)
            draft = [*self.known[f"{uid}.{index}"].token_ids[said : said + length], 7, 7, 7][:length]
            if draft and self.random.random() < self.share_wrong:
                draft[self.random.randrange(len(draft))] ^= 1
            found[uid, index] = tuple(draft)
        return found


def drained(engine: Engine, asked: Sequence[Request], oracle: Oracle | None = None) -> tuple[dict[str, Sample], int]:
    """Samples by uid, and the steps that they took."""
    for one in asked:
        engine.add(one)
    samples, steps = [], 0
    while engine.has_work:
        samples += engine.step(oracle.drafts(engine)) if oracle else engine.step()
        steps += 1
        for key, running in engine.state.scheduler.running.items():
            assert running.num_computed_tokens == len(engine.state.flight.started[key].tokens) - 1
    assert engine.state.scheduler.blocks.num_held == 0
    return by_uid(samples), steps


SETTINGS = {
    "wide": {},
    "chunks": {"max_prefill_tokens": 9, "max_running": 5},
    "a small pool": {"kv_tokens": 96},
    "cached prefixes": {"prefix_cache_tokens": 96, "kv_tokens": 160},
}


@pytest.mark.parametrize(
    ("settings", "share_wrong"),
    slow_but([*((name, 0.6) for name in SETTINGS), ("wide", 0.0)], itertools.product(SETTINGS, (0.0, 0.6))),
)
def test_drafts_change_no_token(settings: str, share_wrong: float) -> None:
    """Stops by token, by string and by limit, within a draft or behind it; temperatures, filters, preemption."""
    model = tiny_model("llama")
    with ExactFloat64():
        plain, plain_steps = drained(Engine(model, SamplingSettings(**SETTINGS[settings])), requests())
        engine = Engine(model, SamplingSettings(**SETTINGS[settings]))
        drafted, steps = drained(engine, requests(), Oracle(plain, share_wrong))
    assert steps < plain_steps
    assert drafted.keys() == plain.keys()
    for uid, sample in drafted.items():
        assert (sample.token_ids, sample.finish_reason) == (plain[uid].token_ids, plain[uid].finish_reason)
        assert sample.logprobs == pytest.approx(plain[uid].logprobs, abs=1e-9)


ASKED = [with_head(0, 19, [14, 9, 30]), with_head(1, 7, [25]), with_head(2, 33, [17, 2])]


def of_model(dtype: torch.dtype, **settings: object) -> Engine:
    return Engine(tiny_model("llama", dtype=dtype), SamplingSettings(max_running=5, **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_exact_mode_to_the_bit(dtype: torch.dtype) -> None:
    plain, _ = drained(of_model(dtype, exact=True), ASKED)
    assert drained(of_model(dtype, exact=True), ASKED, Oracle(plain, 0.4))[0] == plain


@needs_vectors
def test_by_the_compiled_forward_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "PACK_STEPS", 1)
    plain, _ = drained(of_model(torch.bfloat16), ASKED)
    assert drained(of_model(torch.bfloat16), ASKED, Oracle(plain, 0.4))[0] == plain


def test_true_drafts_save_steps_and_all_tokens_are_counted() -> None:
    """30 tokens in steps of one, then in steps of up to five: the first token is of the prompt's logits."""
    model, asked = tiny_model("llama"), [with_head(0, 19, [30])]
    plain, steps = drained(Engine(model, SamplingSettings()), asked)
    assert steps == 30
    engine, drawn, steps_with_drafts = Engine(model, SamplingSettings()), [], []
    engine.add(asked[0])
    while engine.has_work:
        said = len(engine.state.flight.started[0, 0].token_ids) if drawn else 0
        engine.step({(0, 0): plain["0.0"].token_ids[said : said + 4]})
        assert engine.last_step is not None
        drawn.append(engine.last_step.num_drawn)
        done = engine.last_step.done("actor.generate", 0, units=0)
        steps_with_drafts.append((done.kind, done.tokens, done.samples, done.drawn))
    assert drawn == [1, 5, 5, 5, 5, 5, 4]
    assert steps_with_drafts == [
        ("PREFILL", 19, 0, 0), *[("DECODE", 5, 1, 5)] * 5, ("DECODE", 4, 1, 4)
    ]  # fmt: skip


def test_what_was_drafted_wrongly_leaves_no_trace() -> None:
    """Also where all is computed again on the way, and steps without drafts come between."""
    model = tiny_model("llama", dtype=torch.float32)
    plain, _ = drained(Engine(model, SamplingSettings(exact=True)), ASKED)
    engine, oracle = Engine(model, SamplingSettings(exact=True)), Oracle(plain, 1.0)
    for one in ASKED:
        engine.add(one)
    samples = []
    for number in range(6):
        samples += engine.step(oracle.drafts(engine) if number % 2 else {})
        if number == 3:
            engine.update_weights(0)
    samples += drain(engine)
    assert by_uid(samples) == plain


# -- the parts by hand


def test_a_draft_counts_up_to_the_first_token_that_was_not_drawn() -> None:
    keys, drafts = [(0, 0), (0, 1), (1, 0)], {(0, 0): (11, 12, 13), (1, 0): (31,)}
    # Drawn behind the newest token and behind each of the draft.
    assert list(accepted(keys, drafts, [11, 12, 99, 14, 21, 31, 32])) == [(0, 3), (4, 5), (5, 7)]


def begun(sampling: Sampling, lengths: tuple[int, ...] | None = None) -> Response:
    one = Request(Prompt(4, "", (5, 6)), 1, sampling, NoiseKey(1), lengths=lengths)
    return Response.begun(PendingPrompt(one, (one.limit(0, 100),), 1), 0, (3,), (0, 0))


@pytest.mark.parametrize(
    ("sampling", "lengths", "kept", "reason"),
    [
        (Sampling(max_tokens=9), None, 2, FinishReason.STOP),
        (Sampling(max_tokens=9, stop_token_ids=(8,)), None, 3, FinishReason.STOP),
        (FREE, None, 4, None),
        (Sampling(max_tokens=3, stop_token_ids=()), None, 3, FinishReason.LENGTH),
        (Sampling(max_tokens=9), (1,), 1, FinishReason.LENGTH),
    ],
)
def test_the_token_that_ends_a_sample_cuts_what_comes_behind_it(sampling, lengths, kept, reason) -> None:
    response = begun(sampling, lengths)
    assert response.extend([7, 3, 8, 9], [-1.0, -2.0, -3.0, -4.0], None) == kept
    assert (response.token_ids, response.logprobs) == ([7, 3, 8, 9][:kept], [-1.0, -2.0, -3.0, -4.0][:kept])
    assert response.finish_reason is reason


def test_a_stop_string_that_is_complete_within_a_draft() -> None:
    tokenizer = tiny_tokenizer()
    token_ids = tokenizer.encode("fox 7 fox")
    response = begun(Sampling(stop=("7",), stop_token_ids=()))
    kept = response.extend(token_ids, [0.0] * len(token_ids), tokenizer)
    assert tokenizer.decode(token_ids[:kept]).endswith("7")
    assert (kept < len(token_ids), response.finish_reason) == (True, FinishReason.STOP)


def test_drafts_are_no_longer_than_the_limit_allows() -> None:
    flight = InFlight((), 0)
    flight.started[4, 0] = begun(Sampling(max_tokens=3, stop_token_ids=()))
    assert flight.shortened({(4, 0): (1, 2, 3, 4), (9, 9): (1,)}) == {(4, 0): (1, 2)}
    flight.started[4, 0].extend([1, 2], [0.0, 0.0], None)
    assert flight.shortened({(4, 0): (3, 4)}) == {(4, 0): ()}


def rows_of(*samples: tuple[Key, int, int, Sequence[int]]) -> DecodeBatch:
    """Blocks of four tokens. Of each sample its key, newest token, tokens computed and table."""
    rows = DecodeBatch(8, 4, torch.device("cpu"))
    keys, tables = [one[0] for one in samples], [one[3] for one in samples]
    rows.append(keys, [FREE] * len(samples), tables, [(50, newest, count, 2) for _, newest, count, _ in samples])
    return rows


@pytest.mark.parametrize("drafts", [{}, {(0, 1): (80, 81, 82), (2, 0): (90,)}, {(0, 0): (80, 81), (9, 9): (1,)}])
def test_the_batch_of_a_step_is_the_general_one(drafts: dict[Key, tuple[int, ...]]) -> None:
    rows = rows_of(((0, 0), 70, 5, [3, 1]), ((0, 1), 71, 8, [0, 4, 9]), ((2, 0), 72, 0, [6]))
    for _ in range(2):
        fast, general = rows.batch(drafts), ragged(rows.new_tokens(drafts), 4)
        for name in ("token_ids_T", "position_ids_T", "starts_S1", "held_S", "places_T"):
            found, expected = getattr(fast, name), getattr(general, name)
            assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist()), name
        assert (fast.num_new, fast.num_held) == (general.num_new, general.num_held)
        width = general.tables_SM.shape[1]
        assert torch.equal(fast.tables_SM[:, :width], general.tables_SM)
        assert (fast.tables_SM[:, width:] == -1).all()
        rows.remove([(0, 0)])


def test_tables_are_not_said_anew_where_tokens_are_drafted() -> None:
    rows = rows_of(((0, 0), 70, 5, [3, 1]), ((0, 1), 71, 7, [0, 4]))
    assert rows.batch({(0, 0): (80,)}).tables_SM.data_ptr() == rows.batch({}).tables_SM.data_ptr()


def test_rows_advance_by_what_they_drew() -> None:
    rows = rows_of(((0, 0), 70, 5, [3, 1]), ((0, 1), 71, 7, [0, 4]))
    drafts = {(0, 1): (80, 81, 82, 83, 84)}
    rows.set_tables({(0, 1): [0, 4, 9, 2]}, 6)
    batch = rows.batch(drafts)
    assert batch.token_ids_T.tolist() == [70, 71, 80, 81, 82, 83, 84]
    assert batch.position_ids_T.tolist() == [5, 7, 8, 9, 10, 11, 12]
    assert batch.places_T.tolist() == [1 * 4 + 1, 4 * 4 + 3, 9 * 4, 9 * 4 + 1, 9 * 4 + 2, 9 * 4 + 3, 2 * 4]
    noise_keys, places = rows.draws((1, 6))
    assert (noise_keys.tolist(), places.tolist()) == ([50] * 7, [2, 2, 3, 4, 5, 6, 7])
    rows.advance([(0, 0), (0, 1)], [90, 99], [1, 3])
    assert rows.batch({}).token_ids_T.tolist() == [90, 99]
    assert rows.batch({}).position_ids_T.tolist() == [6, 10]
    assert rows.draws((1, 1))[1].tolist() == [3, 5]
