"""Turns that follow replies: the tokens and log-probs of a plain loop without a cache, however they are computed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from plait.data.records import FinishReason, Prompt, Reply, Sample
from plait.generation.engine import Engine, drain
from plait.generation.request import GoingOn, Request
from plait.generation.sampler import NUM_CANDIDATES
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.policy.blocks import num_blocks_for
from tests.generation import oracle
from tests.models.tiny import shared_model, tiny, tiny_model, tiny_tokenizer
from tests.training.exact import ExactFloat64

MOST, LIMIT = 3, 60


def asked(*, whole: bool = False) -> list[Request]:
    """Prompts that begin alike; turns end at many a token, or with `an`. Samples of one are drawn from a part of the
    vocabulary, unless all are from the `whole`."""
    plain = Sampling(max_tokens=LIMIT, stop_token_ids=tuple(range(3, 300, 11)), stop=("an",))
    samplings = [plain, plain if whole else replace(plain, top_p=0.95, keeps_support=True), plain]
    head = [(7 * at) % 290 + 5 for at in range(20)]
    return [Request(Prompt(uid, "", (*head, 9 + uid)), 3, samplings[uid], NoiseKey(5)) for uid in range(3)]


def reply_to(sample: Sample) -> Reply | None:
    """A reply that is a function of what was drawn last; None: the sample has ended."""
    last = sample.token_ids[-1]
    if sample.finish_reason is not FinishReason.STOP or len(sample.replies) + 1 == MOST or last % 5 == 0:
        return None
    ids = tuple((last + 13 * at) % 290 + 5 for at in range(1 + last % 19))
    return Reply(len(sample.token_ids), ids) if sample.num_tokens + len(ids) < LIMIT else None


def rounds(draw: Callable[[list[Request]], Iterable[Sample]], requests: list[Request]) -> dict[str, Sample]:
    """All turns of all samples: those of a round together."""
    ended: dict[str, Sample] = {}
    while requests:
        begun: dict[int, list[Sample]] = {}
        for sample in draw(requests):
            if (reply := reply_to(sample)) is None:
                ended[sample.uid] = sample
            else:
                begun.setdefault(sample.prompt.uid, []).append(replace(sample, replies=(*sample.replies, reply)))
        requests = [
            replace(request, going_on=GoingOn(tuple(mine), frozenset(range(3)) - {sample.index for sample in mine}))
            for request in requests
            if (mine := sorted(begun.get(request.prompt.uid, ()), key=lambda sample: sample.index))
        ]
    return ended


def rounds_of(engine: Engine, *, in_turns: bool = True, whole: bool = False) -> dict[str, Sample]:
    """What is asked, drawn by plait's own engine.

    Args:
        in_turns: whether it is told that samples may go on, and when none does.
        whole: as of `asked`.
    """

    def draw(requests: list[Request]) -> Iterator[Sample]:
        for request in requests:
            engine.add(request)
        return drain(engine)

    ended = rounds(draw, [replace(request, in_turns=in_turns) for request in asked(whole=whole)])
    engine.state.scheduler.turns.end()
    engine.rest()
    return ended


@functools.cache
def expected() -> dict[str, Sample]:
    """The same by a forward over the whole text for each token."""
    with ExactFloat64():
        module, ended = tiny("llama"), {}
        for request in asked():
            for index in range(request.num_samples):
                sample = Sample(request.prompt, index, (), (), "", FinishReason.OPEN)
                reply: Reply | None = Reply(0, ())
                while reply is not None:
                    sample = plain_turn(module, request, sample)
                    if (reply := reply_to(sample)) is not None:
                        sample = replace(sample, replies=(*sample.replies, reply))
                ended[sample.uid] = sample
    assert {len(sample.replies) for sample in ended.values()} == {0, 1, 2}
    assert {sample.finish_reason for sample in ended.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    return ended


def plain_turn(module: Any, request: Request, sample: Sample) -> Sample:
    """One turn more of a sample: positions and noise go on behind what there is."""
    tokenizer, how = tiny_tokenizer(), {"limit": LIMIT, "num_candidates": NUM_CANDIDATES}
    said = oracle.turn(module, tokenizer, request, sample.index, behind=sample.all_ids, **how)
    return replace(
        sample,
        token_ids=(*sample.token_ids, *said[0]),
        logprobs=(*sample.logprobs, *said[1]),
        text=tokenizer.decode([*sample.all_ids, *said[0]], skip_special_tokens=True),
        finish_reason=said[2],
        supports=(*(sample.supports or ()), *map(oracle.as_bytes, said[3])) if said[3] else None,
    )


@pytest.mark.parametrize("in_turns", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_running": 2, "max_prefill_tokens": 7},
        {"kv_tokens": 128, "prefix_cache_tokens": 64},
        {"speculation": 3},
    ],
    ids=str,
)
def test_turns_are_the_oracles_however_they_are_computed(settings: dict[str, Any], in_turns: bool) -> None:
    said = rounds_of(Engine(shared_model("llama"), SamplingSettings(**settings)), in_turns=in_turns)
    assert said.keys() == expected().keys()
    for uid, sample in said.items():
        assert replace(sample, logprobs=()) == replace(expected()[uid], logprobs=())
        assert sample.logprobs == pytest.approx(expected()[uid].logprobs, abs=1e-9)


@pytest.mark.parametrize(
    "settings",
    [{"max_prefill_tokens": 9, "max_running": 3}, {"kv_tokens": 128, "prefix_cache_tokens": 64}, {"speculation": 3}],
    ids=str,
)
def test_exact_turns_have_the_same_bits_however_they_are_computed(settings: dict[str, Any]) -> None:
    model = shared_model("llama", torch.float32)
    plain = rounds_of(Engine(model, SamplingSettings(exact=True, speculation="off")), in_turns=False)
    assert rounds_of(Engine(model, SamplingSettings(exact=True, **settings))) == plain


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("settings", [{}, {"prefix_cache_tokens": 4096}], ids=str)
def test_a_gpu_says_the_same_turns(settings: dict[str, Any]) -> None:
    model = tiny_model("llama", dtype=torch.float32, device="cuda")
    said = rounds_of(Engine(model, SamplingSettings(speculation="off", **settings)))
    of_cpu = rounds_of(Engine(shared_model("llama", torch.float32), SamplingSettings(speculation="off")))
    for uid, sample in said.items():
        assert (sample.token_ids, sample.replies) == (of_cpu[uid].token_ids, of_cpu[uid].replies)
        assert sample.logprobs == pytest.approx(of_cpu[uid].logprobs, abs=1e-4)


@pytest.mark.parametrize("max_running", [2, 64])
def test_a_next_turn_finds_the_turns_before_it_in_the_room_that_samples_take_anyway(max_running: int) -> None:
    def prefilled(*, in_turns: bool, **settings: Any) -> int:
        engine, count = Engine(shared_model("llama"), SamplingSettings(max_running=max_running, **settings)), 0
        step = engine.step

        def counted() -> list[Sample]:
            nonlocal count
            ended = step()
            assert engine.last_step is not None
            count += engine.last_step.num_prefill_tokens
            touched = engine.state.scheduler.blocks.num_touched
            assert settings or touched <= min(9, max_running) * num_blocks_for(21 + LIMIT)
            return ended

        engine.step = counted  # type: ignore[method-assign]
        rounds_of(engine, in_turns=in_turns)
        assert settings or engine.occupancy.kv_bytes == 0, "when no sample goes on, nothing stays"
        return count

    kept, again = prefilled(in_turns=True), prefilled(in_turns=False)
    if max_running == 64:
        assert kept == prefilled(in_turns=False, prefix_cache_tokens=4096) < 0.6 * again
    assert kept < again, "as far as there is room"


def test_weights_are_packed_once_for_all_turns() -> None:
    engine = Engine(shared_model("llama", torch.float32), SamplingSettings())
    if not engine.state.forward.may_be_steady:
        pytest.skip("nothing is packed on this CPU")

    def num_dropped(*, in_turns: bool) -> int:
        forward, count = engine.state.forward, 0
        drop = forward.drop

        def dropped(*, keep_memory: bool = False) -> None:
            nonlocal count
            count += any(backend.is_prepared for backend in forward.backends[:-1])
            drop(keep_memory=keep_memory)

        forward.drop = dropped  # type: ignore[method-assign]
        rounds_of(engine, in_turns=in_turns)
        forward.drop = drop  # type: ignore[method-assign]
        return count

    assert [num_dropped(in_turns=in_turns) for in_turns in (True, False)] == [1, MOST]
