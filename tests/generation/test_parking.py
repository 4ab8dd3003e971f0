"""Samples that halt and go on with other weights: what an engine that was updated in the middle would have said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.records import FinishReason, Sample
from plait.generation import parking
from plait.generation.engine import Engine, drain
from plait.generation.pool import KVPool
from plait.generation.request import GoingOn, Request
from plait.generation.settings import SamplingSettings
from plait.schedule.update_rule import HeldKV
from tests.cases import examples, slow_but
from tests.generation.requests import request
from tests.models.tiny import tiny_model

MODEL = tiny_model(dtype=torch.float64)
WEIGHTS = [parameter.detach().clone() for parameter in MODEL.module.parameters()]
KINDS: list[HeldKV] = ["keep", "recompute"]


def set_weights(version: int) -> None:
    """Other weights for every version, the same ones again for the same."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter, first in zip(MODEL.module.parameters(), WEIGHTS, strict=True):
            noise = torch.randn(first.shape, generator=generator, dtype=first.dtype)
            parameter.copy_(first + 0.02 * version * noise)


def engine(**keys: Any) -> Engine:
    set_weights(0)
    return Engine(MODEL, SamplingSettings(exact=True, **keys))


REQUESTS = [request(0, 9, [3, 12, 20]), request(1, 30, [1, 15]), request(2, 4, [18])]


def said(samples: Sequence[Sample]) -> dict[tuple[int, int], tuple[Any, ...]]:
    return {(s.prompt.uid, s.index): (s.token_ids, s.logprobs, s.versions) for s in samples}


def publish(one: Engine, version: int) -> None:
    set_weights(version)
    one.update_weights(version)


def again(
    requests: Sequence[Request],
    samples: Sequence[Sample],
    *,
    keeps: bool,
    stops: dict[tuple[int, int], int] | None = None,
) -> list[Request]:
    """Those of the samples that have not ended, up to where they are to stop."""
    found = []
    for one in requests:
        mine = [sample for sample in samples if sample.prompt.uid == one.prompt.uid]
        begun = tuple(s for s in mine if s.finish_reason is FinishReason.OPEN and s.token_ids)
        ended = frozenset(s.index for s in mine if s.finish_reason is not FinishReason.OPEN)
        until = {i: n for (uid, i), n in (stops or {}).items() if uid == one.prompt.uid and i not in ended}
        kept = frozenset(s.index for s in begun) if keeps else frozenset()
        going_on = replace(one, going_on=GoingOn(begun, ended, until, kept, parks=keeps))
        if going_on.indices:
            found.append(going_on)
    return found


def halted(requests: Sequence[Request], steps: Sequence[int], kv: HeldKV, **keys: Any) -> list[Sample]:
    """All samples, halted after so many steps of each version, and gone on with the next."""
    one, samples, asked = engine(**keys), [], list(requests)
    for version, count in enumerate(steps):
        for each in asked:
            one.add(each)
        for _ in range(count):
            if one.has_work:
                samples += one.step()
        samples += (stopped := one.halt(parks=kv == "keep"))
        assert not one.has_work
        assert one.state.scheduler.blocks.num_held == 0
        publish(one, version + 1)
        asked = again(requests, [*samples], keeps=kv == "keep")
        samples = [sample for sample in samples if sample.finish_reason is not FinishReason.OPEN]
        del stopped
    for each in asked:
        one.add(each)
    return [*samples, *drain(one)]


def test_what_is_drawn_between_two_versions_leaves_what_is_parked() -> None:
    """An evaluation by the new weights, before the samples go on."""
    found = []
    for evaluates in (False, True):
        one, samples = engine(), []
        for each in again(REQUESTS, [], keeps=True):
            one.add(each)
        for _ in range(4):
            samples += one.step()
        samples += one.halt(parks=True)
        publish(one, 1)
        if evaluates:
            one.add(request(7, 5, [6]))
            assert [len(sample.token_ids) for sample in drain(one)] == [6]
        for each in again(REQUESTS, samples, keeps=True):
            one.add(each)
        ended = [sample for sample in samples if sample.finish_reason is not FinishReason.OPEN]
        found.append(said([*ended, *drain(one)]))
    assert found[0] == found[1]


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("steps", slow_but([[2, 5, 1]], [[4], [2, 5, 1]]))
def test_they_say_what_an_engine_says_whose_weights_change_on_the_way(kv: HeldKV, steps: list[int]) -> None:
    """Tokens, log-probs and versions, to the bit."""
    found = said(halted(REQUESTS, steps, kv))
    one, samples = engine(), []
    for each in REQUESTS:
        one.add(each)
    for version, count in enumerate(steps):
        for _ in range(count):
            samples += one.step()
        set_weights(version + 1)
        one.update_weights(version + 1, kv)
    expected = said([*samples, *drain(one)])
    assert found == expected
    assert len({version for _, _, versions in found.values() for version in versions}) == len(steps) + 1


def stopped(tokens: int, **keys: Any) -> list[Sample]:
    """All samples, which stop after so many tokens of each version, and go on with the next."""
    one, ended, begun = engine(**keys), [], []
    for version in range(4):
        lengths = {(s.prompt.uid, s.index): len(s.token_ids) for s in begun}
        stops = {(r.prompt.uid, i): lengths.get((r.prompt.uid, i), 0) + tokens for r in REQUESTS for i in r.indices}
        for each in again(REQUESTS, [*ended, *begun], keeps=True, stops=stops):
            one.add(each)
        drawn = [*drain(one)]
        begun = [sample for sample in drawn if sample.finish_reason is FinishReason.OPEN]
        ended += [sample for sample in drawn if sample.finish_reason is not FinishReason.OPEN]
        publish(one, version + 1)
    assert not begun
    return ended


def test_more_may_be_parked_than_there_is_room_for() -> None:
    """Six samples, of which each draws five tokens of each version, and 48 tokens in the pool: those that wait for
    their turn keep what they had."""
    assert said(stopped(5, max_running=1, kv_tokens=48)) == said(stopped(5))


def test_a_sample_that_is_half_computed_again_is_computed_by_the_new_weights() -> None:
    """The younger of two gave way, and all halt while its tokens are computed again, eight at a time: what there is
    of them does not stand in for the rest."""
    both, found = [request(0, 20, [40]), request(1, 20, [40])], []
    for keeps in (frozenset({0}), frozenset[int]()):
        one, samples = engine(kv_tokens=96, max_prefill_tokens=8), []
        for each in again(both, [], keeps=True):
            one.add(each)
        while not any(0 < s.num_computed_tokens < s.num_tokens - 1 for s in one.state.scheduler.sequences.preempted):
            samples += one.step()
        assert [sample.prompt.uid for sample in samples] == [0]
        samples += one.halt(parks=True)
        publish(one, 1)
        (left,) = again(both, samples, keeps=True)
        one.add(replace(left, going_on=replace(left.going_on, keeps=keeps)))
        found.append(said([*drain(one)]))
    assert found[0] == found[1]


def test_keys_and_values_that_are_kept_are_not_those_of_the_new_weights() -> None:
    kept, fresh = (said(halted(REQUESTS, [4], kv)) for kv in KINDS)
    assert kept != fresh
    assert kept[0, 0] == fresh[0, 0], "it ended before"


@settings(max_examples=examples(3, 60), deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
    st.sampled_from(KINDS),
    st.sampled_from([{}, {"max_running": 2}, {"max_prefill_tokens": 5}, {"speculation": 3}]),
    st.sampled_from([{}, {"max_running": 3}]),
)
def test_where_they_stood_says_all_that_follows(
    steps: list[int], kv: HeldKV, keys: dict[str, Any], others: dict[str, Any]
) -> None:
    """In another engine, with other places, that has them stop there."""
    one, samples, asked, standing = engine(**keys), [], list(REQUESTS), []
    for version, count in enumerate(steps):
        for each in asked:
            one.add(each)
        for _ in range(count):
            if one.has_work:
                samples += one.step()
        samples += one.halt(parks=kv == "keep")
        standing.append({k: len(v[0]) for k, v in said([s for s in samples if s.finish_reason == "open"]).items()})
        publish(one, version + 1)
        asked = _kept(again(REQUESTS, samples, keeps=kv == "keep"), version)
        samples = [sample for sample in samples if sample.finish_reason is not FinishReason.OPEN]
    for each in asked:
        one.add(each)
    expected = said([*samples, *drain(one)])

    other, samples, begun = engine(**others), [], {}
    for version, stands in enumerate(standing):
        for each in _until(
            _kept(again(REQUESTS, [*samples, *begun.values()], keeps=kv == "keep"), version - 1), stands
        ):
            each = replace(each, going_on=replace(each.going_on, parks=kv == "keep"))
            if each.indices:
                other.add(each)
        while other.has_work:
            for sample in other.step():
                key = sample.prompt.uid, sample.index
                begun.pop(key, None)
                if sample.finish_reason is FinishReason.OPEN:
                    begun[key] = sample
                else:
                    samples.append(sample)
        assert {key: n for key, n in stands.items() if n} == {k: len(s.token_ids) for k, s in begun.items()}
        publish(other, version + 1)
    for each in _kept(again(REQUESTS, [*samples, *begun.values()], keeps=kv == "keep"), len(standing) - 1):
        other.add(each)
    assert said([*samples, *drain(other)]) == expected


def _kept(requests: Sequence[Request], version: int) -> list[Request]:
    """Keys and values are kept of samples that said something with the last weights."""
    found = []
    for one in requests:
        going = one.going_on
        last = {sample.index for sample in going.begun if sample.policy_version == version}
        found.append(replace(one, going_on=replace(going, keeps=going.keeps & last)))
    return found


def _until(requests: Sequence[Request], stands: dict[tuple[int, int], int]) -> list[Request]:
    found = []
    for one in requests:
        going, uid = one.going_on, one.prompt.uid
        said = {sample.index: len(sample.token_ids) for sample in going.begun}
        stops = {i: n for (u, i), n in stands.items() if u == uid and i not in going.left_out}
        stay = {i for i, n in stops.items() if n <= said.get(i, 0)}
        begun = tuple(sample for sample in going.begun if sample.index not in stay)
        until = {i: n for i, n in stops.items() if i not in stay}
        found.append(replace(one, going_on=GoingOn(begun, going.left_out | stay, until, going.keeps - stay)))
    return found


@pytest.mark.parametrize("keys", slow_but([{}], [{}, {"max_running": 2}]), ids=str)
def test_on_a_gpu_it_lies_on_the_host(monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]) -> None:
    """In chunks of eight tokens, so that samples share chunks and lie in several, of which some come back later than
    others: the same to the bit, and no memory of the device."""
    expected = said(halted(REQUESTS, [4, 5, 3], "keep", **keys))
    stored_of: list[int] = []

    def stored(tensor: torch.Tensor) -> torch.Tensor:
        stored_of.append(tensor.nbytes)
        return tensor.clone()

    probe = engine()
    for each in REQUESTS:
        probe.add(each)
    for _ in range(3):
        probe.step()
    token_bytes = parking.token_bytes(probe.state.pool)
    assert token_bytes == 2 * 2 * 2 * 8 * 8, "two layers, keys and values, two heads of eight numbers, float64"
    monkeypatch.setattr(parking, "CHUNK_BYTES", 8 * token_bytes + 5)
    monkeypatch.setattr(parking, "computes_behind", lambda device: True)
    monkeypatch.setattr(parking, "stored", stored)
    assert said(halted(REQUESTS, [4, 5, 3], "keep", **keys)) == expected
    assert max(stored_of) == 8 * token_bytes, "no more at a time"
    assert len(stored_of) > 6


def test_many_samples_are_stored_by_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six samples at a time: one gather of each layer's keys and values, one copy to the host, and back."""
    counted: dict[str, int] = {}
    for kind, name in ((KVPool, "read"), (KVPool, "write")):
        call = getattr(kind, name)

        def noted(*given: Any, name: str = name, call: Any = call) -> Any:
            counted[name] = counted.get(name, 0) + 1
            return call(*given)

        monkeypatch.setattr(kind, name, noted)
    monkeypatch.setattr(parking, "computes_behind", lambda device: True)
    one, asked = engine(), [request(0, 9, [20, 20, 20]), request(1, 30, [20, 20]), request(2, 4, [20])]
    for each in asked:
        one.add(each)
    while len(one.state.flight.started) < 6:
        one.step()
    counted.clear()
    samples = one.halt(parks=True)
    assert (len(samples), counted) == (6, {"read": 2}), "of two layers"
    assert one.occupancy.kv_bytes == 0, "none on the device"
    publish(one, 1)
    for each in again(asked, samples, keeps=True):
        one.add(each)
    counted.clear()
    one.step()
    assert counted == {"write": 4}, "the step itself writes to each layer, too"


def test_what_is_parked_takes_memory_until_it_goes_on() -> None:
    one = engine()
    for each in REQUESTS:
        one.add(each)
    for _ in range(4):
        one.step()
    samples = one.halt(parks=True)
    assert one.occupancy.kv_bytes > 0
    publish(one, 1)
    for each in again(REQUESTS, samples, keeps=True):
        one.add(each)
    list(drain(one))
    assert one.occupancy.kv_bytes == 0
