"""Whatever comes and goes, the pool holds what a fresh prefill computes, and nobody's block is another's."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from plait.data.records import FinishReason, Sample
from plait.generation import engine as engine_module
from plait.generation import forward
from plait.generation.compiled_forward import CompiledForward
from plait.generation.engine import Engine, drain
from plait.generation.moves import SampleMoves
from plait.generation.paged import attention_for
from plait.generation.pool import KVPool, Places
from plait.generation.ragged import NewTokens, ragged
from plait.generation.ragged_context import RaggedContext
from plait.generation.settings import SamplingSettings
from plait.kernels import paged_attention
from plait.kernels.paged_attention import KEYS
from plait.policy.step import Key
from tests.cases import examples, slow_but
from tests.generation.requests import with_head
from tests.models.tiny import shared_model
from tests.training.exact import ExactFloat64

needs_vectors = pytest.mark.skipif(
    not all(map(paged_attention.fast, (torch.float32, torch.bfloat16))), reason="no numba, or a CPU without AVX2"
)
MOST_TOKENS = 60
"""Length of prompt and response together."""
SIZES = st.sampled_from([1, 5, 15, 16, 17, 31, 33, 40])
RESPONSES = st.lists(st.integers(1, 20), min_size=1, max_size=4).map(tuple)


@functools.cache
def compiled_of(dtype: torch.dtype) -> CompiledForward:
    return CompiledForward.of(shared_model(dtype=dtype))


@pytest.fixture(autouse=True)
def _short_responses_are_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "PACK_STEPS", 1)


def narrow(dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    return ExactFloat64() if dtype == torch.float64 else contextlib.nullcontext()


def whole(table: Sequence[int], count: int) -> Places:
    """Where a context with this block table lies."""
    return Places.of(table, 0, count, KEYS, torch.device("cpu"))


@torch.no_grad()
def prefilled(dtype: torch.dtype, tokens: list[int]) -> tuple[KVPool, list[int]]:
    """A pool of its own with a context, and the block table."""
    table = list(range(-(-len(tokens) // KEYS)))
    pool, batch = KVPool(KEYS), ragged([NewTokens(tokens, 0, table)], KEYS)
    pool.reserve(len(table), len(table))
    if dtype == torch.float64:
        model = shared_model(dtype=dtype)
        model.hidden(
            batch.token_ids_T,
            batch.position_ids_T,
            RaggedContext(pool, batch, attention_for(model.device, model.dtype, pool.block_tokens)),
        )
    else:
        compiled_of(dtype).hidden(batch, pool)
    return pool, table


@functools.cache
def alone(dtype: torch.dtype, uid: int, size: int, lengths: tuple[int, ...], head: int) -> dict[str, Sample]:
    """What a request says when nobody else is there, with the weights as they were at first."""
    engine = Engine(shared_model(dtype=dtype), SamplingSettings())
    engine.add(with_head(uid, size, lengths, head))
    return {sample.uid: sample for sample in drain(engine)}


class Loop(RuleBasedStateMachine):
    """Two engines of one model, whose requests, weights and samples come as they may."""

    dtype: torch.dtype
    ahead = False
    """Whether steps are launched before the host knows what the ones before them drew (`generation.overlap`)."""

    def __init__(self) -> None:
        super().__init__()
        self.model = shared_model(dtype=self.dtype)
        self.weights = self.model.weights.clone()
        small = SamplingSettings(max_running=4, max_prefill_tokens=9, kv_tokens=MOST_TOKENS + 36)
        cached = SamplingSettings(max_running=6, kv_tokens=MOST_TOKENS + 84, prefix_cache_tokens=48)
        with mock.patch.object(engine_module, "computes_behind", return_value=self.ahead):
            self.engines = [Engine(self.model, small), Engine(self.model, cached)]
        self.asked: dict[int, tuple[int, tuple[int, ...], int]] = {}
        self.due: set[str] = set()
        """Samples that have not been delivered or taken out."""
        self.version = self.num_updates = 0

    def teardown(self) -> None:
        for engine in self.engines:
            while engine.has_work:
                self.step(self.engines.index(engine), 1)
            assert engine.state.scheduler.blocks.num_held == 0
            assert (engine.occupancy.kv_bytes == 0) == (engine.state.scheduler.blocks.num_cached == 0)
        assert not self.due, "every sample is delivered"
        with torch.no_grad():
            self.model.weights.copy_(self.weights)
        if self.dtype != torch.float64:
            compiled_of(self.dtype).drop()

    # -- what may happen

    @initialize(
        first=st.tuples(SIZES, RESPONSES, st.integers(0, 1)), second=st.tuples(SIZES, RESPONSES, st.integers(0, 1))
    )
    def begin(self, first: tuple[int, tuple[int, ...], int], second: tuple[int, tuple[int, ...], int]) -> None:
        self.add(0, *first, 3)
        self.add(1, *second, 3)

    @rule(which=st.integers(0, 1), size=SIZES, lengths=RESPONSES, head=st.integers(0, 1), then=st.integers(0, 5))
    def add(self, which: int, size: int, lengths: tuple[int, ...], head: int, then: int) -> None:
        uid = len(self.asked)
        self.asked[uid] = size, lengths, head
        self.due |= {f"{uid}.{index}" for index in range(len(lengths))}
        self.engines[which].add(with_head(uid, size, lengths, head))
        self.step(which, then)

    @rule(which=st.integers(0, 1), count=st.integers(1, 8))
    def step(self, which: int, count: int) -> None:
        engine = self.engines[which]
        for _ in range(count):
            if not engine.has_work:
                return
            with narrow(self.dtype):
                for sample in engine.step():
                    self.delivered(sample)
            self.nobody_writes_what_another_holds(engine)
            self.the_pool_holds_what_a_fresh_prefill_computes(engine)

    def delivered(self, sample: Sample) -> None:
        self.due.remove(sample.uid)
        size, lengths, head = self.asked[sample.prompt.uid]
        assert len(sample.token_ids) == lengths[sample.index]
        if sample.policy_version == 0 and sample.token_versions is None and self.version == 0:
            wanted = alone(self.dtype, sample.prompt.uid, size, lengths, head)[sample.uid]
            assert sample.token_ids == wanted.token_ids
            bound = 1e-9 if self.dtype == torch.float64 else 0
            assert sample.logprobs == pytest.approx(wanted.logprobs, abs=bound, rel=0)

    @precondition(lambda self: self.due)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.due)))
        number, index = map(int, uid.split("."))
        whole = data.draw(st.booleans())
        for engine in self.engines:
            for sample in engine.abort(number, None if whole else index):
                assert sample.finish_reason is FinishReason.ABORTED
                self.due.remove(sample.uid)
        assert uid not in self.due

    @rule(which=st.integers(0, 1))
    def compute_again(self, which: int) -> None:
        self.engines[which].update_weights(self.version)

    @precondition(lambda self: self.num_updates < 3 and any(engine.has_work for engine in self.engines))
    @rule(kv=st.sampled_from(["recompute", "keep"]))
    def update_weights(self, kv: str) -> None:
        self.num_updates += 1
        self.version += 1
        with torch.no_grad():
            self.model.weights.mul_(1.05)
        for engine in self.engines:
            engine.update_weights(self.version, kv)  # type: ignore[arg-type]
        if self.dtype != torch.float64:
            compiled_of(self.dtype).drop()

    @precondition(lambda self: any(engine.state.flight.started for engine in self.engines))
    @rule(data=st.data(), between=st.integers(-1, 3))
    def move(self, data: st.DataObject, between: int) -> None:
        """A started sample goes on in the other engine; with `between` steps here after the bulk of it has left."""
        source = data.draw(st.sampled_from([at for at in (0, 1) if self.engines[at].state.flight.started]))
        here, there = self.engines[source], self.engines[1 - source]
        key = data.draw(st.sampled_from(sorted(here.state.flight.started)))
        if key[0] in there.state.flight.pending:
            return  # a prompt is asked of one engine at a time
        stages = []
        there.land()
        here.land()
        if between >= 0 and key in here.state.flight.started:
            stages.append(SampleMoves(here.state).export_sample(*key, final=False))
            self.step(source, between)
            here.land()
        if key in here.state.flight.started:
            stages.append(SampleMoves(here.state).export_sample(*key, since=stages[-1].stop if stages else 0))
            SampleMoves(there.state).import_sample(*stages)

    # -- what holds

    def nobody_writes_what_another_holds(self, engine: Engine) -> None:
        scheduler = engine.state.scheduler
        sequences = list(scheduler.sequences)
        held = [block for sequence in sequences for block in sequence.table]
        assert scheduler.blocks.num_held == len(set(held)), "no block leaks"
        assert scheduler.sequences.num_waiting == len([*scheduler.sequences.waiting])
        for key, running in scheduler.running.items():
            count = running.num_computed_tokens
            if count > self.asked[key[0]][0] and count % KEYS:  # it has written more than its prompt
                assert held.count(running.table[count // KEYS]) == 1, "a block that is written is held once"

    def the_pool_holds_what_a_fresh_prefill_computes(self, engine: Engine) -> None:
        for key, table, count in self.present(engine):
            with narrow(self.dtype):
                fresh, its_table = prefilled(self.dtype, engine.state.flight.started[key].tokens[:count])
            for layer in engine.state.pool.layers:
                ours = engine.state.pool.read(layer, whole(table, count))
                wanted = fresh.read(layer, whole(its_table, count))
                bound = 1e-9 if self.dtype == torch.float64 else 0
                torch.testing.assert_close(ours.key, wanted.key, atol=bound, rtol=0)
                torch.testing.assert_close(ours.value, wanted.value, atol=bound, rtol=0)

    def present(self, engine: Engine) -> Iterator[tuple[Key, list[int], int]]:
        """Running samples all of whose keys and values are of the present weights: (key, block table, tokens)."""
        for key, running in engine.state.scheduler.running.items():
            known = len(engine.state.flight.started[key].tokens)
            if running.is_current and running.num_computed_tokens:
                yield key, running.table, min(known, running.num_computed_tokens)


class Float64Loop(Loop):
    dtype = torch.float64


class Float32Loop(Loop):
    dtype = torch.float32


class BFloat16Loop(Loop):
    dtype = torch.bfloat16


class AheadLoop(BFloat16Loop):
    ahead = True


def run(machine: type[Loop], num_examples: int, num_actions: int = 20) -> None:
    how = settings(max_examples=num_examples, stateful_step_count=num_actions, deadline=None)
    run_state_machine_as_test(machine, settings=how)


@pytest.mark.slow
def test_in_float64_by_the_module() -> None:
    run(Float64Loop, 5)


@needs_vectors
@pytest.mark.parametrize("machine", slow_but([Float32Loop, AheadLoop], [Float32Loop, BFloat16Loop, AheadLoop]))
def test_to_the_bit_by_the_compiled_forward(machine: type[Loop]) -> None:
    run(machine, examples(4, 12))


@pytest.mark.slow
@needs_vectors
@pytest.mark.parametrize("machine", [Float64Loop, Float32Loop, BFloat16Loop, AheadLoop])
def test_longer_and_more_often(machine: type[Loop]) -> None:
    run(machine, 100, 40)
