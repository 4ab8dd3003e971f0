"""The engine against a cache-less oracle, whatever the scheduling; delivery, limits, stops, abort, versions."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from plait.data.records import FinishReason, Prompt, Sample
from plait.errors import CallError, DataError, RunError
from plait.generation import step_clock
from plait.generation.engine import Engine, drain
from plait.generation.forward import Forward
from plait.generation.request import Request
from plait.generation.sampler import NUM_CANDIDATES
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.models.language_model import LanguageModel
from plait.policy.step import StepKind
from tests.cases import examples, slow_but
from tests.generation import oracle
from tests.models.tiny import shared_model, tiny, tiny_llama, tiny_model, tiny_tokenizer
from tests.training.exact import ExactFloat64

TEXTS = (
    "what is 3 plus 4?",
    "0 1 2 3 4 5 6 7 8 9 10",
    "fox",
    "question: what is the sum of two numbers and of 12 minus 5?",
    "a",
    "the answer is 7.",
)
ASKED = (
    (3, Sampling(max_tokens=9)),
    (2, Sampling(temperature=0.6, top_k=5, max_tokens=12, stop_token_ids=tuple(range(60)))),
    (4, Sampling(temperature=1.3, top_p=0.7, keeps_support=True, max_tokens=8, stop=("e", "a", "1", " ", "s"))),
    (1, Sampling(temperature=0.0, max_tokens=10)),
    (3, Sampling(top_k=40, top_p=0.9, max_tokens=14, stop_token_ids=tuple(range(0, 320, 9)), stop=("an",))),
    (2, Sampling(max_tokens=1)),
)


def prompt_of(uid: int, text: str) -> Prompt:
    return Prompt(uid, text, tuple(tiny_tokenizer().encode(text)))


def request_of(
    uid: int = 0, text: str = TEXTS[0], num_samples: int = 1, sampling: Sampling | None = None, **more: object
) -> Request:
    return Request(prompt_of(uid, text), num_samples, sampling or Sampling(max_tokens=8), NoiseKey(11, 2), **more)  # type: ignore[arg-type]


def requests() -> list[Request]:
    return [request_of(uid, text, *asked) for uid, (text, asked) in enumerate(zip(TEXTS, ASKED, strict=True))]


def engine_of(model: LanguageModel, max_running: int = 8, max_prefill_tokens: int = 64) -> Engine:
    return Engine(model, SamplingSettings(max_running=max_running, max_prefill_tokens=max_prefill_tokens))


def by_uid(samples: list[Sample] | Iterator[Sample]) -> dict[str, Sample]:
    table: dict[str, Sample] = {}
    for sample in samples:
        assert sample.uid not in table, "a sample is delivered twice"
        table[sample.uid] = sample
    return table


@functools.cache
def expected(family: str) -> dict[str, Sample]:
    module = tiny(family)
    with ExactFloat64():
        return by_uid(
            sample
            for request in requests()
            for sample in oracle.generate(
                module, tiny_tokenizer(), request, max_positions=256, num_candidates=NUM_CANDIDATES
            )
        )


def assert_same(found: dict[str, Sample], wanted: dict[str, Sample], tolerance: float = 1e-9) -> None:
    assert found.keys() == wanted.keys()
    for uid, sample in found.items():
        assert replace(sample, logprobs=()) == replace(wanted[uid], logprobs=())
        assert sample.logprobs == pytest.approx(wanted[uid].logprobs, abs=tolerance)


def assert_the_oracles(engine: Engine, family: str, chosen: list[int], pauses: list[int]) -> None:
    """Its samples of these requests are the oracle's; each comes as many steps after the one before as its pause."""
    everything = requests()
    delivered: list[Sample] = []
    with ExactFloat64():
        for which in chosen:
            engine.add(everything[which])
            for _ in range(pauses[which]):
                if engine.has_work:
                    delivered += engine.step()
                    assert engine.occupancy.num_running <= engine.state.limits.max_running
        delivered += drain(engine)
    assert_same(by_uid(delivered), {u: s for u, s in expected(family).items() if int(u.split(".")[0]) in chosen})


@pytest.mark.parametrize(
    "family", slow_but(["llama", "gemma2"], ["llama", "gemma2", "gpt_oss", "deepseek_v3", "smollm3", "qwen3_moe"])
)
@settings(max_examples=examples(3, 12), deadline=None, phases=[Phase.generate])
@given(
    order=st.permutations(range(len(TEXTS))),
    taken=st.integers(1, len(TEXTS)),
    max_running=st.integers(1, 9),
    max_prefill_tokens=st.sampled_from([1, 20, 64]),
    pauses=st.lists(st.integers(0, 6), min_size=len(TEXTS), max_size=len(TEXTS)),
)
def test_samples_are_the_oracles_however_they_are_scheduled(
    family: str, order: list[int], taken: int, max_running: int, max_prefill_tokens: int, pauses: list[int]
) -> None:
    assert_the_oracles(engine_of(shared_model(family), max_running, max_prefill_tokens), family, order[:taken], pauses)


def test_the_pool_exercises_every_end() -> None:
    """Guards the test above: stops by token and by string, limits, and responses longer than the sliding window."""
    samples = expected("llama").values()
    ends = {(s.prompt.uid, s.finish_reason) for s in samples}
    assert {(1, FinishReason.STOP), (2, FinishReason.STOP), (0, FinishReason.LENGTH)} <= ends
    assert any(s.finish_reason is FinishReason.STOP and len(s.token_ids) > 1 for s in samples)
    assert any(len(s.token_ids) > 5 for s in expected("gemma2").values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precisions_and_teacher_forced_logprobs(dtype: torch.dtype) -> None:
    """Stored log-probs are those of the trainer's forward over the same tokens at the same temperature."""
    from plait.data.packed import pack

    model = tiny_llama(dtype)
    engine = engine_of(model, max_running=5)
    asked = Sampling(temperature=0.7, max_tokens=40)
    for uid in range(3):
        engine.add(request_of(uid, TEXTS[uid], 4, asked))
    samples = sorted(drain(engine), key=lambda s: (s.prompt.uid, s.index))
    groups = [
        (samples[4 * uid].prompt.token_ids, [s.token_ids for s in samples[4 * uid : 4 * uid + 4]]) for uid in range(3)
    ]
    with torch.no_grad():
        logprobs, _ = model.logprobs(pack(groups), 0.7)
    stored = torch.tensor([lp for s in samples for lp in s.logprobs])
    difference = (logprobs - stored).abs()
    # bfloat16 logits of size 4 step by 2**-6; the two forwards may round to neighbours.
    assert difference.max() < (1e-5 if dtype == torch.float32 else 0.3)
    assert difference.mean() < (1e-6 if dtype == torch.float32 else 2e-2)


def test_float64_logprobs_are_the_trainers() -> None:
    from plait.data.packed import pack

    model = shared_model("llama")
    engine = engine_of(model)
    engine.add(request_of(num_samples=3, sampling=Sampling(max_tokens=30, top_p=0.8)))
    samples = sorted(drain(engine), key=lambda s: s.index)
    with torch.no_grad():
        logprobs, _ = model.logprobs(pack([(samples[0].prompt.token_ids, [s.token_ids for s in samples])]), 1.0)
    torch.testing.assert_close(
        logprobs, torch.tensor([lp for s in samples for lp in s.logprobs], dtype=torch.float64), atol=1e-9, rtol=0
    )


def test_a_prompt_is_computed_once_and_a_finished_sample_makes_room_at_once() -> None:
    engine = engine_of(shared_model("llama"), max_running=2)
    engine.add(request_of(5, TEXTS[0], 5, Sampling(), lengths=(3, 1, 4, 2, 2)))
    kinds, batches, delivered = [], [], []
    while engine.has_work:
        delivered.append(sorted(s.index for s in engine.step()))
        record = engine.last_step
        assert record is not None
        assert record.num_finished == len(delivered[-1])
        kinds.append(record.kind)
        batches.append((record.num_sequences, record.num_tokens, record.num_context_tokens))
    num_prompt = len(prompt_of(5, TEXTS[0]).token_ids)
    # The prefill starts 0 and 1, and 1 ends; then 2 starts; 0 ends; 3 starts and ends with 2; 4 starts and ends.
    assert kinds == [StepKind.PREFILL] + [StepKind.DECODE] * 4
    assert delivered == [[1], [], [0], [2, 3], [4]]
    assert batches[0] == (1, num_prompt, 0)
    assert batches[1] == (2, 2, 2 * num_prompt)
    assert batches[2] == (2, 2, 2 * num_prompt + 2)


def test_every_sample_counts_once_also_while_waiting() -> None:
    engine = engine_of(shared_model("llama"), max_running=3)
    for uid in range(2):
        engine.add(request_of(uid, num_samples=4, sampling=Sampling(max_tokens=6, stop_token_ids=())))
    assert (engine.occupancy.num_running, engine.occupancy.num_waiting) == (0, 8)
    engine.step()
    assert (engine.occupancy.num_running, engine.occupancy.num_waiting) == (3, 5)
    assert engine.occupancy.kv_bytes > 0
    assert len(by_uid(drain(engine))) == 8
    assert (engine.occupancy.num_running, engine.occupancy.num_waiting, engine.occupancy.kv_bytes) == (0, 0, 0)


def test_the_pool_grows_with_long_responses() -> None:
    model = tiny_llama(max_position_embeddings=200)
    engine = engine_of(model, max_running=2)
    engine.add(request_of(0, sampling=Sampling(max_tokens=150, stop_token_ids=())))
    engine.add(request_of(1, sampling=Sampling(max_tokens=3, stop_token_ids=())))
    engine.step()
    engine.step()
    before = engine.occupancy.kv_bytes
    samples = by_uid(iter(list(drain(engine))))
    assert len(samples["0.0"].token_ids) == 150
    assert before < 2 * 200 * 2 * 2 * 2 * 8 * 8, "the pool was sized for the longest response at once"
    from plait.data.packed import pack

    with torch.no_grad():
        logprobs, _ = model.logprobs(pack([(samples["0.0"].prompt.token_ids, [samples["0.0"].token_ids])]), 1.0)
    torch.testing.assert_close(logprobs, torch.tensor(samples["0.0"].logprobs, dtype=torch.float64), atol=1e-9, rtol=0)


def test_the_models_positions_bound_prompt_and_response() -> None:
    model = tiny_llama(max_position_embeddings=20)
    num_prompt = len(prompt_of(0, TEXTS[0]).token_ids)
    engine = engine_of(model)
    engine.add(request_of(sampling=Sampling(max_tokens=1000, stop_token_ids=())))
    (sample,) = drain(engine)
    assert len(sample.token_ids) == 20 - num_prompt
    assert sample.finish_reason is FinishReason.LENGTH
    long = Prompt(1, "", (5,) * 20)
    for prompt, message in ((long, "fewer than 20 tokens.*found 20"), (Prompt(2, "", ()), "at least one token")):
        with pytest.raises(DataError, match=message):
            engine.add(Request(prompt, 1, Sampling(), NoiseKey(0)))
    with pytest.raises(DataError, match="recorded lengths"):
        engine.add(request_of(3, lengths=(19,)))
    assert not engine.has_work


def test_ends() -> None:
    """Stop tokens of the model by default, none when told so, and the text without special tokens."""
    model = shared_model("llama")
    engine = engine_of(model)
    free = Sampling(max_tokens=40, stop_token_ids=())
    engine.add(request_of(0, num_samples=1, sampling=free))
    (sample,) = drain(engine)
    assert (len(sample.token_ids), sample.finish_reason) == (40, FinishReason.LENGTH)

    third = sample.token_ids[2]
    first = sample.token_ids.index(third)
    engine.add(request_of(0, sampling=replace(free, stop_token_ids=(9999, third))))
    (stopped,) = drain(engine)
    assert stopped.token_ids == sample.token_ids[: first + 1]
    assert stopped.logprobs == pytest.approx(sample.logprobs[: first + 1], abs=1e-12)
    assert stopped.finish_reason is FinishReason.STOP

    model_stops = replace(model, eos_token_ids=(9999, third))
    own = Engine(model_stops, SamplingSettings())
    own.add(request_of(0, sampling=replace(free, stop_token_ids=None)))
    assert next(drain(own)).token_ids == stopped.token_ids

    special = tiny_llama(dtype=torch.float64)
    with torch.no_grad():
        special.weights.zero_()  # equal logits: greedy says token 0, a special one, for ever
    mute = Engine(special, SamplingSettings())
    mute.add(request_of(0, sampling=Sampling(temperature=0.0, max_tokens=3)))
    (sample,) = drain(mute)
    assert (sample.token_ids, sample.text) == ((0, 0, 0), "")


def test_recorded_lengths_are_replayed() -> None:
    engine = engine_of(shared_model("llama"), max_running=3)
    lengths = (5, 1, 9, 30, 2)
    everything = Sampling(max_tokens=4, stop_token_ids=tuple(range(320)))
    engine.add(request_of(0, num_samples=5, sampling=everything, lengths=lengths))
    samples = sorted(drain(engine), key=lambda s: s.index)
    assert tuple(len(s.token_ids) for s in samples) == lengths
    assert {s.finish_reason for s in samples} == {FinishReason.LENGTH}


def test_abort_returns_what_was_said_and_leaves_the_others_alone() -> None:
    engine = engine_of(shared_model("llama"), max_running=4)
    chosen = requests()[:3]
    for request in chosen:
        engine.add(request)
    delivered = [s for _ in range(3) for s in engine.step()]
    out = engine.abort(0, 1) + engine.abort(2)
    assert engine.occupancy.num_running > 0
    assert {s.uid for s in out} | {s.uid for s in delivered if s.prompt.uid == 2} >= {"0.1", "2.3"}
    assert engine.abort(2) + engine.abort(0, 1) + engine.abort(99) == []
    delivered += drain(engine)
    wanted = expected("llama")
    for sample in out:
        assert sample.finish_reason is FinishReason.ABORTED
        assert sample.token_ids == wanted[sample.uid].token_ids[: len(sample.token_ids)]
    found = by_uid(delivered)
    assert_same(found, {uid: wanted[uid] for uid in found}, tolerance=1e-5)
    assert found.keys() | {s.uid for s in out} == {uid for uid in wanted if uid[0] in "012"}
    assert {"0.0", "0.2", "1.0", "1.1"} <= found.keys()
    engine.add(chosen[0])  # its uid is free again
    assert len(list(drain(engine))) == 3


def test_abort_of_everything_leaves_no_work_and_no_memory() -> None:
    engine = engine_of(shared_model("llama"), max_running=2)
    engine.add(request_of(0, num_samples=4, sampling=Sampling(max_tokens=50, stop_token_ids=())))
    engine.step()
    out = engine.abort(0)
    assert sorted((s.index, len(s.token_ids)) for s in out) == [(0, 1), (1, 1), (2, 0), (3, 0)]
    assert not engine.has_work
    assert engine.occupancy.kv_bytes == 0


def test_weights_change_between_rollouts() -> None:
    model = tiny_llama()
    engine = Engine(model, SamplingSettings(), policy_version=3)
    engine.add(request_of(num_samples=2))
    before = by_uid(drain(engine))
    assert {s.policy_version for s in before.values()} == {3}
    with torch.no_grad():
        model.weights.mul_(0.8)
    engine.update_weights(4)
    engine.add(request_of(num_samples=2))
    after = by_uid(drain(engine))
    assert {s.policy_version for s in after.values()} == {4}
    fresh = Engine(model, SamplingSettings(), policy_version=4)
    fresh.add(request_of(num_samples=2))
    assert by_uid(drain(fresh)) == after
    assert after["0.0"].logprobs != before["0.0"].logprobs

    engine.add(request_of(num_samples=2))
    engine.step()
    with torch.no_grad():
        model.weights.mul_(1.1)
    with pytest.raises(CallError, match="weights changed while"):
        engine.step()


def test_one_prompt_instance_at_a_time() -> None:
    engine = engine_of(shared_model("llama"))
    engine.add(request_of(1))
    with pytest.raises(CallError, match="prompt 1 is in flight"):
        engine.add(request_of(1))
    engine.step()
    with pytest.raises(CallError, match="prompt 1 is in flight"):
        engine.add(request_of(1))


def test_broken_weights_stop_the_run_by_name() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.weights[0] = torch.nan  # of the tied embedding: every row of logits holds one
    engine = Engine(model, SamplingSettings())
    engine.add(request_of(7))
    with pytest.raises(RunError, match=r"sample 7\.0.*finite logits"):
        list(drain(engine))


def test_noise_key_fields_change_the_samples() -> None:
    engine = engine_of(shared_model("llama"))
    keys = [NoiseKey(1), NoiseKey(2), NoiseKey(1, rollout=1), NoiseKey(1, attempt=1)]
    said = []
    for key in keys:
        engine.add(replace(request_of(0, num_samples=2), noise=key))
        said += [s.token_ids for s in drain(engine)]
    assert len(set(said)) == 2 * len(keys)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_a_cuda_device_says_the_same(family: str) -> None:
    engine = engine_of(tiny_model(family, device="cuda"), max_running=5)
    for request in requests():
        engine.add(request)
    assert_same(by_uid(drain(engine)), expected(family), tolerance=1e-5)


def test_packing_is_told_apart_from_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    prepare = Forward.prepare

    def takes_long(forward: Forward, longest) -> None:
        clock[0] += 0.0 if forward.is_decided else 2.5
        prepare(forward, longest)

    monkeypatch.setattr(Forward, "prepare", takes_long)
    engine = Engine(tiny_llama(), SamplingSettings())
    engine.add(Request(Prompt(0, "", (5, 6, 7)), 1, Sampling(), NoiseKey(0), lengths=(4,)))
    packing_s = []
    while engine.has_work:
        engine.step()
        assert engine.last_step is not None
        packing_s.append(engine.last_step.packing_s)
    assert packing_s == [2.5, 0, 0, 0]
