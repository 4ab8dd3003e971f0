"""The engine while work comes and goes: pools of any size, weights that change in flight, samples that move.

Its fuzz test is test_pool_fuzz.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from plait.data.records import FinishReason, Prompt
from plait.errors import CallError, DataError
from plait.generation.engine import Engine, drain
from plait.generation.joint import Alone
from plait.generation.moves import SampleMoves
from plait.generation.request import Request
from plait.generation.sampler import sample as draw
from plait.generation.settings import SamplingSettings
from plait.generation.transfer import SampleState
from plait.kernels.noise import NoiseKey
from plait.layout.mesh import Cluster, Layout
from plait.layout.move import plan_move
from tests.cases import slow_but
from tests.generation.requests import FREE, with_head
from tests.generation.test_engine import by_uid, request_of
from tests.layout import played_moves
from tests.models.tiny import shared_model, tiny_llama


def test_a_cached_prefix_is_not_computed_again_until_the_weights_change() -> None:
    engine = Engine(shared_model(), SamplingSettings(prefix_cache_tokens=64))
    computed = []
    for uid in range(4):
        engine.add(with_head(uid, 50, [3]))
        list(engine.step())
        assert engine.last_step is not None
        computed.append(engine.last_step.num_prefill_tokens)
        list(drain(engine))
        assert engine.occupancy.kv_bytes > 0
        if uid == 2:
            engine.update_weights(1)
            assert engine.occupancy.kv_bytes == 0
    assert computed == [50, 50 - 48, 50 - 48, 50]


@pytest.mark.parametrize("exact", [False, True])
def test_a_conversation_goes_on_from_what_was_said(exact: bool) -> None:
    """The next turn's prompt is the last one, what was said, and more: of these only the end is computed, to the same
    tokens as by an engine that knows nothing. 20 + 30 tokens are held but for the newest: three full blocks."""
    engine = Engine(shared_model(), SamplingSettings(prefix_cache_tokens=200, exact=exact))
    engine.add(with_head(0, 20, [30, 24]))
    first, _ = sorted(drain(engine), key=lambda sample: sample.index)
    assert engine.occupancy.kv_tokens[0] == 0
    assert engine.state.scheduler.blocks.num_cached == 1 + 2 + 1, "the prompt's, and what each said"
    turn = Prompt(1, "", (*first.prompt.token_ids, *first.token_ids, 17, 4, 99))
    asked = Request(turn, 2, FREE, NoiseKey(6), lengths=(9, 5))
    fresh = Engine(shared_model(), SamplingSettings(exact=exact))
    for one, computed in ((engine, 53 - 48), (fresh, 53)):
        one.add(asked)
        one.step()
        assert one.last_step is not None
        assert one.last_step.num_prefill_tokens == computed
    found, expected = by_uid(drain(engine)), by_uid(drain(fresh))
    assert {uid: one.token_ids for uid, one in found.items()} == {uid: one.token_ids for uid, one in expected.items()}
    if exact:
        assert found == expected
    assert engine.state.scheduler.blocks.num_held == 0


def test_prompts_in_flight_share_what_they_begin_with() -> None:
    """Three of the four blocks of 50 tokens: those of the first are those of all, also in the same step, and when all
    is computed again."""
    engine = Engine(shared_model(), SamplingSettings())
    for uid in range(3):
        engine.add(with_head(uid, 50, [9, 9]))
    engine.step()
    assert engine.last_step is not None
    assert (engine.last_step.num_prefill_tokens, engine.occupancy.kv_tokens[0]) == (50 + 2 * 2, (3 + 3) * 16)
    engine.update_weights(1)
    engine.step()
    assert engine.last_step.num_prefill_tokens == 51 + 5 * 3
    engine.add(with_head(3, 50, [3]))
    engine.add(with_head(4, 50, [3], head=1))
    engine.step()
    assert engine.last_step.num_prefill_tokens == 2 + 50
    assert len(list(drain(engine))) == 8
    assert engine.occupancy.kv_bytes == 0
    engine.add(with_head(5, 50, [3]))
    engine.step()
    assert engine.last_step.num_prefill_tokens == 50, "nobody held it any more"


@pytest.mark.parametrize("cache_tokens", [0, 64])
def test_later_prompts_share_nothing_with_samples_of_older_weights(cache_tokens: int) -> None:
    model = tiny_llama()
    engine = Engine(model, SamplingSettings(prefix_cache_tokens=cache_tokens))
    engine.add(with_head(0, 40, [9]))
    engine.step()
    with torch.no_grad():
        model.weights.mul_(1.1)
    engine.update_weights(1, "keep")
    engine.add(with_head(1, 40, [9]))
    engine.step()
    assert engine.last_step is not None
    assert engine.last_step.num_prefill_tokens == 40
    assert {sample.uid for sample in drain(engine)} == {"0.0", "1.0"}
    cached = 48 // 16 if cache_tokens else 0
    assert engine.state.scheduler.blocks.num_cached == cached, "of the second alone: prompt and response"


def test_a_pool_too_small_for_one_is_refused_by_name() -> None:
    engine = Engine(shared_model(), SamplingSettings(kv_tokens=40))
    with pytest.raises(
        DataError, match=r"the 32 tokens of the pool, found 30 and up to 3; raise `sampling\.kv_tokens`"
    ):
        engine.add(with_head(0, 30, [3]))
    engine.add(with_head(0, 30, [2]))
    assert engine.occupancy.kv_tokens == (0, 32)
    assert len(list(drain(engine))) == 1


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_weights_that_change_in_flight(kv: str) -> None:
    """Tokens are stamped one by one. Recomputed, the rest is what the new weights say of the text so far; kept, the
    next token follows from old keys and values under new weights."""
    model = tiny_llama()
    engine = Engine(model, SamplingSettings(max_running=3), policy_version=1)
    engine.add(with_head(0, 20, [9, 9, 9, 9]))
    for _ in range(4):
        engine.step()
    said = {key: list(response.token_ids) for key, response in engine.state.flight.started.items()}
    old = {layer: kv.key.clone() for layer, kv in engine.state.pool.layers.items()}
    with torch.no_grad():
        model.weights.mul_(1.1)
    engine.update_weights(2, kv)  # type: ignore[arg-type]
    engine.step()
    assert (engine.last_step.num_prefill_tokens > 0) == (kv == "recompute")  # type: ignore[union-attr]
    same = torch.equal(engine.state.pool.layers[1].key[0], old[1][0])  # a block of the prompt
    assert same == (kv == "keep")
    samples = by_uid(drain(engine))
    for (_, index), token_ids in said.items():
        sample = samples[f"0.{index}"]
        assert sample.token_ids[: len(token_ids)] == tuple(token_ids)
        assert sample.token_versions == (1,) * len(token_ids) + (2,) * (9 - len(token_ids))
        assert sample.policy_version == 2
    last = samples["0.3"]  # started later: its first token came of the prompt's logits
    assert last.token_versions == ((1,) + (2,) * 8 if kv == "keep" else None)
    if kv == "recompute":
        from plait.data.packed import pack

        with torch.no_grad():
            logprobs, _ = model.logprobs(pack([(last.prompt.token_ids, [samples["0.0"].token_ids])]), 1.0)
        at = len(said[0, 0])
        assert samples["0.0"].logprobs[at:] == pytest.approx(logprobs[at:].tolist(), abs=1e-6)
        assert samples["0.0"].logprobs[:at] != pytest.approx(logprobs[:at].tolist(), abs=1e-6)


def test_who_chooses_tokens_may_be_another() -> None:
    seen = []

    def choose(logits_BV, noise_B, rows):
        seen.append(len(logits_BV))
        token_ids_B, logprobs_B = draw(logits_BV, noise_B, rows)
        return torch.full_like(token_ids_B, 7), logprobs_B

    engine = Engine(shared_model(), SamplingSettings(), joint=Alone(choose))
    engine.add(with_head(0, 5, [3, 3]))
    assert {sample.token_ids for sample in drain(engine)} == {(7, 7, 7)}
    assert seen == [2, 2, 2]


# -- samples that move


def moved(state: SampleState) -> SampleState:
    """As it arrives on another rank: keys and values went through a planned move."""
    if state.stop == state.start:
        return state
    source, target = (state.holdings(Layout.on((rank,))) for rank in (0, 1))
    cluster = Cluster(1, 2)
    plan = plan_move(source, target, cluster, bucket_bytes=4096)
    memory = played_moves.allocate(source, target)
    words = {torch.float32: torch.float32, torch.float64: torch.float64, torch.bfloat16: torch.float16}[state.kv.dtype]
    memory[0]["kv"][:] = state.kv.view(words).numpy()
    played_moves.execute(plan, memory)
    return replace(state, kv=torch.from_numpy(memory[1]["kv"]).view(state.kv.dtype))


MOVED = list(itertools.product([False, True], [torch.bfloat16, torch.float32], ["llama", "deepseek_v3", "gemma2"]))
HALF = [case for number, case in enumerate(MOVED) if (number + number // 6) % 2 == 0]
"""Every family in both ways and both widths."""


@pytest.mark.parametrize(("two_stages", "dtype", "family"), slow_but(HALF, MOVED), ids=str)
def test_a_sample_goes_on_elsewhere_bit_by_bit(family: str, dtype: torch.dtype, two_stages: bool) -> None:
    model, exact = shared_model(family, dtype), SamplingSettings(exact=True)
    asked = [with_head(0, 19, [14, 9]), with_head(1, 7, [12])]

    def begun(number: int) -> Engine:
        engine = Engine(model, exact, policy_version=4)
        for one in asked[:number]:
            engine.add(one)
        for _ in range(3):
            engine.step()
        return engine

    stayed = by_uid(drain(begun(2)))
    source, target = begun(2), Engine(model, exact, policy_version=4)
    target.add(with_head(9, 11, [20]))
    target.step()
    stages = []
    if two_stages:
        stages.append(moved(SampleMoves(source.state).export_sample(0, 1, final=False)))
        for _ in range(3):
            source.step()
    stages.append(moved(SampleMoves(source.state).export_sample(0, 1, since=stages[-1].stop if stages else 0)))
    assert stages[-1].stop - stages[-1].start == (3 if two_stages else 19 + 2)
    SampleMoves(target.state).import_sample(*stages)
    target.step()
    assert target.last_step.num_prefill_tokens == 0, "nothing is computed again"  # type: ignore[union-attr]
    found = by_uid([*drain(source), *drain(target)])
    del found["9.0"]
    assert found == stayed
    assert source.occupancy.kv_bytes == target.occupancy.kv_bytes == 0


def test_what_does_not_arrive_is_computed_again() -> None:
    """No room in the target's pool; the source preempted or recomputed the sample between the stages."""
    model, exact = shared_model("llama", torch.float32), SamplingSettings(exact=True)
    stayed = Engine(model, exact)
    stayed.add(with_head(0, 19, [14]))
    (wanted,) = drain(stayed)
    for case in ("full", "recomputed", "nothing sent"):
        source = Engine(model, exact)
        source.add(with_head(0, 19, [14]))
        for _ in range(5):
            source.step()
        first = SampleMoves(source.state).export_sample(0, 0, final=False)
        target = Engine(model, exact.model_copy(update={"kv_tokens": 48}))
        if case == "full":
            target.add(with_head(5, 30, [8]))
            target.step()
        elif case == "recomputed":
            source.update_weights(source.policy_version)
        last = SampleMoves(source.state).export_sample(0, 0, since=first.stop)
        assert not source.has_work
        SampleMoves(target.state).import_sample(*([first] if case != "nothing sent" else []), last)
        found = by_uid(drain(target))
        assert found["0.0"] == wanted


def test_a_moved_sample_carries_its_versions_and_can_be_aborted() -> None:
    source = Engine(shared_model(), SamplingSettings(), policy_version=1)
    source.add(with_head(0, 19, [14, 9, 3]))
    for _ in range(4):
        source.step()
    target = Engine(shared_model(), SamplingSettings(), policy_version=2)
    for index in (0, 1):
        SampleMoves(target.state).import_sample(SampleMoves(source.state).export_sample(0, index))
    assert not source.has_work
    with pytest.raises(CallError, match="in flight"):
        SampleMoves(target.state).import_sample(SampleMoves(target.state).export_sample(0, 0, final=False))
    (aborted,) = target.abort(0, 1)
    assert (len(aborted.token_ids), aborted.finish_reason) == (4, FinishReason.ABORTED)
    assert (aborted.policy_version, aborted.token_versions) == (1, None)
    (sample,) = drain(target)
    assert sample.token_versions == (1,) * 4 + (2,) * 10


def test_one_request_at_a_time_also_after_an_import() -> None:
    engine = Engine(shared_model(), SamplingSettings())
    engine.add(request_of(3, num_samples=2))
    engine.step()
    state = SampleMoves(engine.state).export_sample(3, 0)
    SampleMoves(engine.state).import_sample(state)
    assert len(list(drain(engine))) == 2
