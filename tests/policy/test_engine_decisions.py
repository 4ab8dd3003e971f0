"""What is simulated is what is run: given the recorded lengths the simulated engine takes the engine's decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from plait.data.records import Sample
from plait.generation.engine import Engine
from plait.generation.moves import SampleMoves
from plait.generation.request import Request
from plait.generation.settings import SamplingSettings
from plait.models.language_model import LanguageModel
from plait.policy import batching
from plait.policy.blocks import prefix_keys
from plait.policy.migration import Transfer
from plait.policy.step import Key, StepPlan
from tests.cases import slow_but
from tests.generation.test_engine import requests
from tests.models.tiny import tiny_model
from tests.policy import played_engine as simulator
from tests.policy.played_engine import SimulatedEngine

Decided = list[StepPlan]


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> Decided:
    """Every plan that any scheduler makes: who runs, starts, gives way, which blocks are copied and computed."""
    plans: Decided = []
    plan = batching.Scheduler.plan

    def recorded(scheduler: batching.Scheduler, *drafts: Any) -> StepPlan:
        plans.append(plan(scheduler, *drafts))
        return plans[-1]

    monkeypatch.setattr(batching.Scheduler, "plan", recorded)
    return plans


def asked() -> list[Request]:
    """Seven prompts, of which one comes twice, with one to four samples each."""
    found = requests()
    return [*found, replace(found[3], prompt=replace(found[3].prompt, uid=100), num_samples=4)]


def simulated(request: Request, said: dict[tuple[int, int], Sequence[int]], *, cached: bool) -> simulator.Request:
    """The request as the simulator knows it: numbers, keys of the prompt, and where there is a prefix cache those of
    what was said."""
    uid, prompt = request.prompt.uid, request.prompt.token_ids
    responses = [said[uid, index] for index in range(request.num_samples)]
    lengths = tuple(map(len, responses))
    if not cached:
        return simulator.Request(uid, len(prompt), lengths, prefix_keys(prompt))
    contexts = tuple(prefix_keys([*prompt, *response[:-1]]) for response in responses)
    return simulator.Request(uid, len(prompt), lengths, prefix_keys(prompt), contexts)


SIZES = [(1, 1, None, 0), (3, 20, None, 0), (8, 64, None, 0), (64, 1000, None, 0), (8, 64, 96, 0), (64, 7, 96, 64)]
QUICK = (SIZES[2], SIZES[5])


@pytest.mark.parametrize(
    ("max_running", "max_prefill_tokens", "kv_tokens", "prefix_cache_tokens"), slow_but(QUICK, SIZES)
)
def test_the_simulated_engine_repeats_the_engines_steps(
    max_running, max_prefill_tokens, kv_tokens, prefix_cache_tokens, decided
):
    """Also where the pool is too small and samples are preempted, and where prompts share blocks."""
    model = tiny_model("llama")
    settings = SamplingSettings(
        max_running=max_running,
        max_prefill_tokens=max_prefill_tokens,
        kv_tokens=kv_tokens,
        prefix_cache_tokens=prefix_cache_tokens,
    )
    engine = Engine(model, settings)
    for request in asked():
        engine.add(request)
    ran, said = [], {}
    while engine.has_work:
        finished = engine.step()
        said |= {(sample.prompt.uid, sample.index): sample.token_ids for sample in finished}
        step = engine.last_step
        ran.append((step.kind, step.num_sequences, step.num_tokens, step.num_context_tokens, len(finished)))
    plans = decided.copy()
    decided.clear()

    again = SimulatedEngine(settings.limits(model.max_positions))
    for request in asked():
        again.add(simulated(request, said, cached=prefix_cache_tokens > 0))
    predicted = []
    while again.has_work:
        step = again.step()
        predicted.append((step.kind, step.num_sequences, step.num_tokens, step.num_context_tokens, len(step.finished)))
    assert predicted == ran
    assert decided == plans
    assert len(ran) > 8
    assert any(plan.preempted for plan in plans) == (kv_tokens is not None)
    assert any(plan.copies for plan in plans)


@dataclass
class Script:
    """Two engines (or simulated ones) to which things happen between their steps."""

    engines: Sequence[Any]
    requests: Sequence[Any]
    running: Callable[[], Sequence[Key]]
    """Samples in the batch of engine 0."""
    move: Callable[[Key, Transfer], None]
    """One of them to engine 1."""
    finished: list[Any]

    def add(self, which: int, at: int) -> None:
        self.engines[which].add(self.requests[at])

    def step(self, which: int, count: int) -> None:
        for _ in range(count):
            if self.engines[which].has_work:
                self.finished.append(self.engines[which].step())

    def play(self) -> None:
        """Requests come in between, samples are aborted and move, an engine runs dry and goes on."""
        first, second = self.engines
        self.add(0, 0)
        self.step(0, 2)
        self.add(0, 2)
        self.add(0, 3)
        self.add(1, 4)
        self.step(0, 3)
        self.step(1, 2)
        first.abort(2, 1)
        self.move(self.running()[0], Transfer.KV)  # a sample of a prompt that is new there
        self.step(1, 1)
        self.move(self.running()[0], Transfer.KV)  # its prompt's blocks are there now
        self.step(0, 1)
        self.step(1, 1)
        self.move(self.running()[-1], Transfer.RECOMPUTE)
        self.step(0, 1)
        self.add(0, 1)
        self.step(0, 1)
        first.abort(1)
        self.step(0, 100)
        assert not first.has_work
        self.add(0, 5)  # after an idle moment
        self.step(1, 100)
        assert not second.has_work
        self.add(1, 6)
        self.step(1, 100)
        self.step(0, 100)


def played(model: LanguageModel, settings: SamplingSettings, everything: Sequence[Request]) -> dict:
    """What the engine says when the script is played; what an aborted sample had said, as well."""
    first, second = engines = [Engine(model, settings), Engine(model, settings)]

    def move(key: Key, transfer: Transfer) -> None:
        state = SampleMoves(first.state).export_sample(*key)
        if transfer is Transfer.RECOMPUTE:
            state = replace(state, start=state.stop, kv=state.kv[:0])
        SampleMoves(second.state).import_sample(state)

    script = Script(engines, everything, lambda: list(first.state.scheduler.running), move, [])
    script.play()
    samples: list[Sample] = [sample for finished in script.finished for sample in finished]
    return {(sample.prompt.uid, sample.index): sample.token_ids for sample in samples}


@pytest.mark.parametrize(("kv_tokens", "prefix_cache_tokens"), slow_but([(112, 64)], [(None, 0), (112, 0), (112, 64)]))
def test_also_when_requests_come_and_go_and_samples_move(kv_tokens, prefix_cache_tokens, decided):
    model = tiny_model("llama")
    settings = SamplingSettings(
        max_running=5, max_prefill_tokens=20, kv_tokens=kv_tokens, prefix_cache_tokens=prefix_cache_tokens
    )
    everything = [
        replace(request, lengths=tuple(6 + 5 * (index % 3) + at for index in range(request.num_samples)))
        for at, request in enumerate(asked())
    ]
    said = played(model, settings, everything)
    plans = decided.copy()
    decided.clear()

    for request in everything:  # those that were taken out never come to their end
        for index in range(request.num_samples):
            said.setdefault((request.prompt.uid, index), range(request.lengths[index]))
    limits = settings.limits(model.max_positions)
    first, second = engines = [SimulatedEngine(limits), SimulatedEngine(limits)]
    numbers = [simulated(request, said, cached=prefix_cache_tokens > 0) for request in everything]

    def move(key: Key, transfer: Transfer) -> None:
        (sample,) = first.export([key])
        second.import_(sample, transfer)

    Script(engines, numbers, lambda: list(first.scheduler.running), move, []).play()
    assert decided == plans
    assert any(plan.joined for plan in plans)
    assert any(plan.preempted for plan in plans) == (kv_tokens is not None)
    assert len(plans) > 40
