"""The engine with drafts of its own: no sample says anything else, whatever is drafted and however much of it."""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch

from plait.generation import forward
from plait.generation.backend import unserved
from plait.generation.engine import Engine, drain
from plait.generation.moves import SampleMoves
from plait.generation.settings import SamplingSettings
from plait.generation.speculates import NoSpeculation
from plait.generation.speculator import Speculator
from plait.generation.steady_drafts import WhereSteady
from plait.kernels import paged_attention
from plait.policy.step import Key, StepPlan
from plait.recipes.engine_checks import STEADY
from plait.speculation.speculation import How
from tests.cases import slow_but
from tests.generation.requests import with_head as request
from tests.generation.scripted_drafter import ScriptedDrafter
from tests.generation.test_drafts import drained
from tests.generation.test_engine import by_uid, requests
from tests.models.tiny import tiny_model
from tests.training.exact import ExactFloat64

needs_vectors = pytest.mark.skipif(not paged_attention.fast(torch.bfloat16), reason="no numba, or a CPU without AVX2")
ASKED = [request(0, 19, [14, 9, 30]), request(1, 7, [25]), request(2, 33, [17, 2])]


RANDOM = random.Random(5)
DRAFTERS = {
    "random": lambda said, most: [RANDOM.randrange(50) for _ in range(RANDOM.randint(0, most))],
    "what was said last, again": lambda said, most: said[-1:] * most,
    "ends": lambda said, most: [3] * most,
    "its own words": lambda said, most: (said * most)[:most],
}


@pytest.mark.parametrize("how", slow_but([4], ["adaptive", 1, 4, 15]))
def test_the_pool_changes_no_token(how: How) -> None:
    """Twice the same prompts, so that all of it is known: stops by token, string and limit; filters; greedy samples."""
    model = tiny_model("llama")
    with ExactFloat64():
        plain, plain_steps = drained(Engine(model, SamplingSettings()), requests())
        engine = Engine(model, SamplingSettings(speculation=how))
        first, _ = drained(engine, requests())
        again, steps = drained(engine, requests())
    for found in (first, again):
        assert found.keys() == plain.keys()
        for uid, sample in found.items():
            assert (sample.token_ids, sample.finish_reason) == (plain[uid].token_ids, plain[uid].finish_reason)
            assert sample.logprobs == pytest.approx(plain[uid].logprobs, abs=1e-9)
    if how != "adaptive":
        assert steps < plain_steps


def test_what_samples_hold_is_known_at_the_first_step_of_a_rollout() -> None:
    """One sample after another: the last step of a rollout and those that compute prompts hold other samples, or
    none."""
    engine = Engine(tiny_model("llama"), SamplingSettings(speculation="adaptive", max_running=1))
    speculates, asked = engine.speculates, []
    assert isinstance(speculates, Speculator)
    is_due = speculates.speculation.is_due
    speculates.speculation.is_due = lambda *held: asked.append(held) or is_due(*held)  # type: ignore[method-assign]
    for prompt, num_tokens in ((request(0, 19, [6]), 19), (request(1, 7, [5]), 7)):
        asked.clear()
        drained(engine, [prompt])
        assert asked[0] == (1, num_tokens), "the prompt is computed"


SETTINGS = [{}, {"max_prefill_tokens": 9, "max_running": 3}, {"kv_tokens": 96}]
QUICK = [("random", SETTINGS[2]), ("its own words", SETTINGS[0])]


@pytest.mark.parametrize(("drafter", "settings"), slow_but(QUICK, itertools.product(DRAFTERS, SETTINGS)), ids=str)
def test_no_drafter_changes_a_token(drafter: str, settings: dict) -> None:
    model = tiny_model("llama")
    with ExactFloat64():
        plain, _ = drained(Engine(model, SamplingSettings(**settings)), requests())
        speculates = Speculator(4, ScriptedDrafter(DRAFTERS[drafter]))
        found, _ = drained(Engine(model, SamplingSettings(**settings), speculates=speculates), requests())
    assert {uid: sample.token_ids for uid, sample in found.items()} == {
        uid: sample.token_ids for uid, sample in plain.items()
    }
    assert speculates.counts.drafted > 0


@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16], [torch.float32, torch.bfloat16]), ids=str)
def test_in_exact_mode_to_the_bit(dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=dtype)
    plain, _ = drained(Engine(model, SamplingSettings(max_running=5, exact=True)), ASKED)
    engine = Engine(model, SamplingSettings(max_running=5, exact=True, speculation=6))
    assert drained(engine, ASKED)[0] == plain
    assert drained(engine, ASKED)[0] == plain
    assert engine.speculates is not None
    assert engine.speculates.counts.accepted > 20, "all was known the second time"


@needs_vectors
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_by_the_compiled_forward_to_the_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "PACK_STEPS", 1)
    model = tiny_model("llama", dtype=dtype)
    plain, _ = drained(Engine(model, SamplingSettings(max_running=5)), ASKED)
    engine = Engine(model, SamplingSettings(max_running=5, speculation=6))
    assert drained(engine, ASKED)[0] == plain
    assert drained(engine, ASKED)[0] == plain


@needs_vectors
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_by_default_it_drafts_what_changes_no_bit(dtype: torch.dtype) -> None:
    """In steps of the compiled forward alone: none for answers that are too short to pack weights for."""
    model = tiny_model("llama", dtype=dtype)
    plain, _ = drained(Engine(model, SamplingSettings(max_running=5, speculation="off")), ASKED)
    engine = Engine(model, SamplingSettings(max_running=5))
    assert isinstance(engine.speculates, WhereSteady)
    drained(engine, [request(7, 12, [forward.PACK_STEPS - 1])])
    assert engine.speculation is None
    engine.state.update_weights(0, "recompute")
    for _ in range(2):
        assert drained(engine, ASKED)[0] == plain
    assert engine.speculation is not None
    assert engine.speculation.steps > 0


def steady_engine(speculator: Speculator, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Its drafts by default are another's."""
    engine = Engine(tiny_model("llama", dtype=torch.float32), SamplingSettings(max_running=5))
    assert isinstance(engine.speculates, WhereSteady)
    monkeypatch.setattr(engine.speculates, "made", lambda: speculator)
    return engine


@needs_vectors
def test_steps_that_are_not_steady_have_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is known, and however sure it is: the first answers are by the module, the others by compiled layers."""
    speculator = Speculator(4, ScriptedDrafter(DRAFTERS["its own words"]))
    engine = steady_engine(speculator, monkeypatch)
    drafted = []
    compute = engine.state.forward.logits
    monkeypatch.setattr(
        engine.state.forward,
        "logits",
        lambda rows, drafts, chunks: (
            drafted.append((bool(drafts), engine.state.forward.is_steady)) or compute(rows, drafts, chunks)
        ),
    )
    drained(engine, [request(0, 19, [12])])
    assert set(drafted) == {(False, False)}
    assert not engine.state.forward.is_steady
    drained(engine, [request(1, 19, [30])])
    assert (True, True) in drafted
    assert (True, False) not in drafted


def test_by_default_it_drafts_nothing_where_layers_round_by_the_number_of_rows() -> None:
    for model in (tiny_model("llama"), tiny_model("gemma2", dtype=torch.float32)):
        engine = Engine(model, SamplingSettings())
        drained(engine, ASKED)
        assert engine.speculation is None
        assert not engine.state.forward.is_steady


def test_by_default_it_drafts_in_exact_mode() -> None:
    model = tiny_model("llama")
    plain, _ = drained(Engine(model, SamplingSettings(exact=True, speculation="off")), ASKED)
    engine = Engine(model, SamplingSettings(exact=True))
    assert drained(engine, ASKED)[0] == plain
    assert engine.speculation is not None


def test_off_is_the_same_path_with_no_drafts() -> None:
    """An engine whose drafts are none computes the steps of one without, one after another, to the bit."""
    model = tiny_model("llama")
    plain, plain_steps = drained(Engine(model, SamplingSettings(speculation="off")), ASKED)
    nothing = Speculator(4, ScriptedDrafter(lambda said, most: []))
    found, steps = drained(Engine(model, SamplingSettings(), speculates=nothing), ASKED)
    assert (found, steps) == (plain, plain_steps)


@needs_vectors
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_what_recipes_say_of_steady_rows_is_what_backends_declare(dtype: str) -> None:
    """Known without torch where a run is predicted; here by who computes."""
    model = tiny_model("llama", dtype=getattr(torch, dtype))
    kinds = [kind for kind in forward.BACKENDS if unserved(kind, model) is None]
    declared = any(kind.of(model).is_steady for kind in kinds)  # type: ignore[union-attr]
    assert declared == (dtype in STEADY["cpu"])
    assert {device for kind in forward.BACKENDS for device in kind.devices} == set(STEADY)


def test_samples_move_between_engines_that_draft_to_the_same_bits() -> None:
    """In the middle of their responses, and with new weights on the way."""
    model = tiny_model("llama", dtype=torch.float32)
    plain, _ = drained(Engine(model, SamplingSettings(exact=True)), ASKED)
    source, target = (Engine(model, SamplingSettings(exact=True, speculation=5)) for _ in range(2))
    for one in plain.values():
        for engine in (source, target):
            engine.speculates.recall(one.prompt.token_ids, one.token_ids, one.logprobs)
    for one in ASKED:
        source.add(one)
    samples = [sample for _ in range(2) for sample in source.step()]
    for uid, index in sorted(source.state.flight.started)[::2]:
        SampleMoves(target.state).import_sample(SampleMoves(source.state).export_sample(uid, index))
    source.update_weights(0)
    for engine in (target, source):
        samples += drain(engine)
    assert by_uid(samples) == plain
    assert all(engine.speculation is not None and engine.speculation.drafted > 0 for engine in (source, target))


def test_samples_that_are_taken_out_are_forgotten_and_their_uids_come_again() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    plain, _ = drained(Engine(model, SamplingSettings(exact=True)), ASKED)
    engine = Engine(model, SamplingSettings(exact=True, speculation=5))
    for one in ASKED:
        engine.add(one)
    for _ in range(3):
        engine.step()
    for one in ASKED:
        engine.abort(one.prompt.uid)
    assert drained(engine, ASKED)[0] == plain


def two_started() -> tuple[Engine, Speculator]:
    """Samples 0.0 and 0.1 of one prompt, which have said 1 token; every token is drafted to be 7."""
    speculator = Speculator(2, ScriptedDrafter(lambda said, most: [7] * most))
    engine = Engine(tiny_model("llama"), SamplingSettings(speculation=2), speculates=NoSpeculation())
    engine.add(request(0, 19, [30, 30]))
    engine.step()
    return engine, speculator


def says(engine: Engine, key: Key, *token_ids: int) -> None:
    engine.state.flight.started[key].token_ids.extend(token_ids)
    engine.state.flight.started[key].logprobs.extend([-1.0] * len(token_ids))


def step_of(key: Key, num_drafted: int) -> StepPlan:
    return StepPlan((), (), (), (), (key,), (1 + num_drafted,), 20, (), ())


def test_a_step_without_drafts_leaves_those_of_a_step_in_flight() -> None:
    """Two steps in flight, each of one sample: that of 0.1 has no room for its draft, and lands while the two drafted
    tokens of 0.0 are computed: one is accepted."""
    engine, speculator = two_started()
    started = engine.state.flight.started
    assert speculator.drafts(started, [(0, 0)]) == {(0, 0): [7, 7]}
    assert speculator.drafts(started, [(0, 1)]) == {(0, 1): [7, 7]}
    speculator.done(step_of((0, 1), 0), 1, 1e-3)
    says(engine, (0, 0), 7, 5)
    says(engine, (0, 1), 7)
    speculator.done(step_of((0, 0), 2), 2, 1e-3)
    speculator.rest()
    assert (speculator.counts.tried_of.sum(), speculator.counts.accepted_of.sum()) == (2, 1)


def test_a_sample_that_left_and_came_back_between_two_questions_is_drafted_for() -> None:
    """Another one with its key and what it had said, beside the same others: it is known by what it has said, and what
    it says is heard."""
    engine, _ = two_started()
    speculator = Speculator(2, ScriptedDrafter(lambda said, most: [len(said)] * most))
    started, running = engine.state.flight.started, [(0, 0), (0, 1)]
    said = [len(started[key].token_ids) for key in running]
    assert speculator.drafts(started, running) == {key: [count] * 2 for key, count in zip(running, said, strict=True)}
    started[0, 1] = copy.deepcopy(started[0, 1])
    says(engine, (0, 1), 5)
    assert speculator.drafts(started, running)[0, 1] == [said[1] + 1] * 2
    says(engine, (0, 1), 6)
    assert speculator.drafts(started, running)[0, 1] == [said[1] + 2] * 2


def test_what_is_known_word_for_word_is_said_in_few_steps() -> None:
    """30 tokens again: the first of the prompt's logits, then at most 16 a step."""
    model, asked = tiny_model("llama"), [request(0, 19, [30])]
    engine = Engine(model, SamplingSettings(speculation=15))
    with ExactFloat64():
        first, _ = drained(engine, asked)
        again, steps = drained(engine, asked)
    assert again["0.0"].token_ids == first["0.0"].token_ids
    assert steps == 3
