"""What an engine asks of a sample that comes from another one, and of its callers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from plait.data.records import FinishReason, Prompt
from plait.errors import CallError, DataError
from plait.generation.checks import check_new
from plait.generation.engine import Engine, drain
from plait.generation.moves import SampleMoves
from plait.generation.request import GoingOn, Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.models.language_model import LanguageModel
from plait.policy.prompts_alone import may_compute
from plait.policy.step import PROMPT
from tests.generation.requests import with_head
from tests.models.tiny import tiny_llama, tiny_model
from tests.workers.said import said_by


def begun(model: LanguageModel, one: Request, steps: int = 4, version: int = 1) -> Engine:
    engine = Engine(model, SamplingSettings(), policy_version=version)
    engine.add(one)
    for _ in range(steps):
        engine.step()
    return engine


def test_a_sample_that_the_pool_can_never_hold_is_refused_and_the_others_go_on() -> None:
    model = tiny_llama()
    source = begun(model, with_head(0, 20, [30]))
    target = Engine(model, SamplingSettings(kv_tokens=32), policy_version=1)
    target.add(with_head(1, 8, [6]))
    target.step()
    with pytest.raises(
        DataError, match=r"the 32 tokens of the pool, found 20 and up to 30; raise `sampling\.kv_tokens`"
    ):
        SampleMoves(target.state).import_sample(SampleMoves(source.state).export_sample(0, 0, final=False))
    (other,) = drain(target)
    assert len(other.token_ids) == 6
    (stayed,) = drain(source)
    assert len(stayed.token_ids) == 30


def test_a_sample_of_another_model_or_dtype_is_refused() -> None:
    one = with_head(0, 20, [30])
    state = SampleMoves(begun(tiny_model("llama", dtype=torch.float32), one).state).export_sample(0, 0)
    for other in (
        tiny_model("gemma2", dtype=torch.float32),
        tiny_model("llama", dtype=torch.float32, num_hidden_layers=3),
    ):
        with pytest.raises(DataError, match=r"sample 0\.0: expected a sample of this model"):
            SampleMoves(Engine(other, SamplingSettings()).state).import_sample(state)
    narrow = Engine(tiny_model("llama", dtype=torch.bfloat16), SamplingSettings())
    with pytest.raises(
        DataError, match="expected keys and values in bfloat16, the dtype of this engine's model, found f"
    ):
        SampleMoves(narrow.state).import_sample(state)
    assert not narrow.has_work
    SampleMoves(narrow.state).import_sample(replace(state, start=0, stop=0, kv=state.kv[:0]))
    (sample,) = drain(narrow)
    assert sample.token_ids[:4] == state.token_ids


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_keys_of_other_weights_are_computed_again_unless_they_are_to_be_kept(kv: str) -> None:
    source = begun(tiny_llama(), with_head(0, 20, [9]))
    state = SampleMoves(source.state).export_sample(0, 0)
    newer = tiny_llama()
    with torch.no_grad():
        newer.weights.mul_(1.1)
    target = Engine(newer, SamplingSettings(), policy_version=2)
    SampleMoves(target.state).import_sample(state, kv=kv)  # type: ignore[arg-type]
    target.step()
    assert target.last_step is not None
    assert target.last_step.num_prefill_tokens == (20 + 4 if kv == "recompute" else 0)
    (moved,) = drain(target)
    assert moved.token_versions == (1,) * 4 + (2,) * 5
    # The same as if the weights had changed in place.
    model = tiny_llama()
    stayed = begun(model, with_head(0, 20, [9]))
    with torch.no_grad():
        model.weights.mul_(1.1)
    stayed.update_weights(2, kv)  # type: ignore[arg-type]
    (sample,) = drain(stayed)
    assert moved.token_ids == sample.token_ids
    assert moved.logprobs == pytest.approx(sample.logprobs, abs=1e-9)


def test_a_sample_that_moves_stops_where_its_request_says() -> None:
    one = replace(with_head(0, 20, [30]), going_on=GoingOn(stops={0: 9}))
    stayed, source = begun(tiny_llama(), one), begun(tiny_llama(), one)
    target = Engine(tiny_llama(), SamplingSettings(), policy_version=1)
    SampleMoves(target.state).import_sample(SampleMoves(source.state).export_sample(0, 0))
    (moved,), (sample,) = drain(target), drain(stayed)
    assert moved.finish_reason is FinishReason.OPEN
    assert len(moved.token_ids) == 9
    assert (moved.token_ids, moved.logprobs) == (sample.token_ids, sample.logprobs)


def test_stages_have_to_be_of_one_prompt() -> None:
    source = begun(tiny_llama(), with_head(0, 20, [9]))
    source.add(with_head(1, 5, [9]))
    source.step()
    states = [SampleMoves(source.state).export_sample(uid, 0) for uid in (0, 1)]
    target = Engine(tiny_llama(), SamplingSettings(), policy_version=1)
    with pytest.raises(CallError, match="expected the stages of an export, found none"):
        SampleMoves(target.state).import_sample()
    with pytest.raises(CallError, match="expected stages of prompt 1, found one of 0"):
        SampleMoves(target.state).import_sample(*states)


def test_a_word_that_is_no_choice_is_refused_and_nothing_changes() -> None:
    engine = begun(tiny_llama(), with_head(0, 20, [9]))
    with pytest.raises(CallError, match="kv: expected 'recompute' or 'keep', found 'kep'"):
        engine.update_weights(2, "kep")  # type: ignore[arg-type]
    assert engine.policy_version == 1
    state = SampleMoves(engine.state).export_sample(0, 0)
    with pytest.raises(CallError, match="found 'kep'"):
        SampleMoves(engine.state).import_sample(state, kv="kep")  # type: ignore[arg-type]


def test_calls_at_a_wrong_time_say_what_to_do() -> None:
    engine = Engine(tiny_llama(), SamplingSettings())
    with pytest.raises(CallError, match="no sample is in flight; ask `has_work` first"):
        engine.step()
    with pytest.raises(CallError, match=r"sample 0\.1 has not started here, or has ended"):
        SampleMoves(engine.state).export_sample(0, 1)
    engine.add(with_head(0, 5, [9]))
    with pytest.raises(CallError, match="prompt 0 is in flight already: wait for its samples, abort them, or"):
        engine.add(with_head(0, 5, [9]))


class NotLookedThrough(dict[tuple[int, int], None]):
    """Samples in flight."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        raise AssertionError("they may be many")


def test_a_prompt_is_not_looked_for_among_all_samples() -> None:
    """With turns, as many are asked for at once as there are: this took 2 s for 32,000 samples of an instance."""
    started = NotLookedThrough({(0, 1): None})
    asked = with_head(0, 5, [9, 9, 9])
    check_new(replace(asked, going_on=GoingOn(left_out=frozenset({1}))), (), started)
    for pending in ((), (0,)):
        with pytest.raises(CallError, match="prompt 0 is in flight already"):
            check_new(asked, pending, started if not pending else NotLookedThrough())


def test_requests_without_samples_or_lengths_for_each() -> None:
    prompt, sampling, noise = Prompt(3, "", (5, 6)), Sampling(), NoiseKey(0)
    with pytest.raises(DataError, match="prompt 3: expected num_samples of at least 1, found 0"):
        Request(prompt, 0, sampling, noise)
    with pytest.raises(DataError, match="prompt 3: expected a length for each of 2 samples, found 1"):
        Request(prompt, 2, sampling, noise, lengths=(4,))
    with pytest.raises(DataError, match="prompt 3: expected lengths of at least 1 token, found 0"):
        Request(prompt, 1, sampling, noise, lengths=(0,))


def prompt_engine(model: LanguageModel, *asked: Request, version: int = 1) -> Engine:
    """Which has computed these prompts for others."""
    engine = Engine(model, SamplingSettings(max_prefill_tokens=9, exact=True), policy_version=version)
    engine.state.compute_for_others()
    for one in asked:
        engine.add(one)
    while may_compute(engine.state.scheduler.sequences, engine.state.scheduler.room):
        assert engine.step() == []
    return engine


@pytest.mark.parametrize("num_tokens", [1, 16, 20, 32])
def test_a_prompt_that_was_computed_elsewhere_has_its_samples_begin_behind_its_last_token(num_tokens: int) -> None:
    """Bit by bit as where it is computed, in exact mode; the source holds nothing any more."""
    model, one = tiny_llama(), with_head(0, num_tokens, [9, 1, 4])
    whole = Engine(model, SamplingSettings(exact=True))
    whole.add(one)
    expected = said_by(list(drain(whole)))
    source = prompt_engine(model, one, version=0)
    moves = SampleMoves(source.state)
    assert moves.may_leave((0, PROMPT))
    assert not moves.started
    state = moves.export_sample(0, PROMPT)
    assert (state.token_ids, state.num_computed_tokens) == ((), num_tokens)
    assert not source.has_work
    assert source.occupancy.kv_tokens[0] == 0
    target = Engine(model, SamplingSettings(exact=True))
    target.add(with_head(7, 12, [3]))
    target.step()
    target.add(state.request)
    SampleMoves(target.state).import_prompt(state)
    samples = target.step()
    assert target.last_step is not None
    assert target.last_step.num_prefill_tokens == 1
    assert said_by([sample for sample in (*samples, *drain(target)) if sample.prompt.uid == 0]) == expected


def test_of_a_prompt_only_what_is_not_there_and_has_room_and_is_of_these_weights_is_brought() -> None:
    model, one = tiny_llama(), with_head(0, 40, [4])
    state = SampleMoves(prompt_engine(model, one).state).export_sample(0, PROMPT)
    like = with_head(7, 40, [9])  # begins with the same tokens

    def computed(version: int, *before: Request, **settings: int) -> int:
        target = Engine(model, SamplingSettings(**settings), policy_version=version)
        for other in before:
            target.add(other)
            target.step()
        target.add(state.request)
        SampleMoves(target.state).import_prompt(state)
        target.step()
        assert target.last_step is not None
        num_computed = target.last_step.num_prefill_tokens
        assert len(list(drain(target))) == 1 + len(before)
        return num_computed

    assert computed(1) == 1
    assert computed(1, like) == 1
    assert computed(2) == 40, "it is of other weights"
    assert computed(1, with_head(7, 24, [10]), kv_tokens=64) == 0, "it waits for room, and is computed then"


def test_a_prompt_leaves_when_it_is_computed() -> None:
    engine = Engine(tiny_llama(), SamplingSettings(max_prefill_tokens=8))
    engine.state.compute_for_others()
    engine.add(with_head(0, 12, [3]))
    engine.step()
    assert not SampleMoves(engine.state).may_leave((0, PROMPT))
    engine.step()
    assert SampleMoves(engine.state).may_leave((0, PROMPT))
    assert [sample.finish_reason for sample in engine.abort(0)] == [FinishReason.ABORTED]
    assert not engine.has_work
