"""The leader's side of vLLM: what it asks for, and what becomes of a process that dies, hangs or raises."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.data.records import Prompt, Sample
from plait.errors import CallError, ConfigError, DataError, RunError
from plait.generation.engine import Engine, drain
from plait.generation.request import GoingOn, Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.launch.local import LocalProcesses
from plait.models.loading import load_model
from plait.vllm.engine import VllmEngine
from plait.vllm.messages import Loading
from tests.generation.test_turns import asked, rounds, rounds_of
from tests.runs.conftest import tiny_folder  # noqa: F401
from tests.vllm.faulty import Faulty, Unready
from tests.vllm.stand_in import Here, StandIn


def loading(folder: Path, max_tokens: int = 64) -> Loading:
    return Loading(str(folder), "float32", max_tokens, 8, 64, 1 << 20, "cpu")


def engine_of(folder: Path, start: Any, max_tokens: int = 64, **keys: Any) -> VllmEngine:
    model, room = load_model(str(folder), dtype="float32"), loading(folder, max_tokens)
    return VllmEngine("actor", model, lambda: model.export(torch.float32).state, room, start, **keys)


def here(folder: Path, max_tokens: int = 64) -> tuple[VllmEngine, Here]:
    group = Here(StandIn(None, loading(folder, max_tokens)))
    return engine_of(folder, lambda loading, folder: group, max_tokens), group


def request(uid: int, num_samples: int = 2, tokens: int = 9, **keys: Any) -> Request:
    return Request(Prompt(uid, "", (5, 6, 7)), num_samples, Sampling(max_tokens=tokens, **keys), NoiseKey(3))


def draw(engine: VllmEngine, requests: list[Request]) -> Iterable[Sample]:
    for one in requests:
        engine.add(one)
    return ask(engine).values()


def ask(engine: VllmEngine) -> dict[tuple[int, int], Any]:
    samples = {}
    while engine.has_work:
        samples |= {(one.prompt.uid, one.index): one for one in engine.advance("actor.generate")[1]}
    return samples


ASKED = (request(0), request(1, 3, temperature=0.5, stop=("7",)), request(2, top_k=3, top_p=0.8, stop_token_ids=(9,)))


def test_samples_are_those_of_our_own_engine(tiny_folder: Path) -> None:  # noqa: F811
    engine, _ = here(tiny_folder)
    own = Engine(load_model(str(tiny_folder), dtype="float32"), SamplingSettings(max_running=8))
    for one in ASKED:
        engine.add(one)
        own.add(one)
    expected = {(one.prompt.uid, one.index): one for one in drain(own)}
    assert engine.running == (7,)
    samples = ask(engine)
    assert samples.keys() == expected.keys()
    for key, one in expected.items():
        assert replace(samples[key], logprobs=()) == replace(one, logprobs=())
        assert samples[key].logprobs == pytest.approx(one.logprobs, abs=1e-5)
    assert engine.running == (0,)
    assert engine.at_work == frozenset()


def test_turns_are_those_of_our_own_engine(tiny_folder: Path) -> None:  # noqa: F811
    engine, group = here(tiny_folder, max_tokens=128)
    own = rounds_of(Engine(load_model(str(tiny_folder), dtype="float32"), SamplingSettings(max_running=8)), whole=True)
    assert {len(sample.replies) for sample in own.values()} == {0, 1, 2}
    engine.update_weights(3)
    turns = rounds(functools.partial(draw, engine), [replace(request, in_turns=True) for request in asked(whole=True)])
    assert turns.keys() == own.keys()
    assert "rest" not in group.worker.said, "keys and values stay while samples may go on"
    engine.end_turns()
    assert group.worker.said[-1] == "rest"
    for uid, sample in own.items():
        assert replace(turns[uid], logprobs=()) == replace(sample, logprobs=(), policy_version=3)
        assert turns[uid].logprobs == pytest.approx(sample.logprobs, abs=1e-5)


def test_weights_are_brought_once_and_when_they_have_changed(tiny_folder: Path) -> None:  # noqa: F811
    engine, group = here(tiny_folder)
    for version in (0, 0, 1):
        if version:
            engine.update_weights(version)
        engine.add(request(0))
        samples = ask(engine)
        assert {one.policy_version for one in samples.values()} == {version}
    assert [said for said in group.worker.said if said == "update_weights"] == ["update_weights"] * 2
    assert group.worker.said[-1] == "rest"


def test_other_weights_than_were_written_are_found(tiny_folder: Path, monkeypatch: Any) -> None:  # noqa: F811
    engine, group = here(tiny_folder)
    monkeypatch.setattr(group.worker, "update_weights", lambda stored: "0" * 64)
    engine.add(request(0))
    with pytest.raises(RunError, match=r"vLLM holds other weights of `actor` than the trainer: the hash of what was"):
        engine.advance("actor.generate")


def test_what_does_not_fit_is_refused(tiny_folder: Path) -> None:  # noqa: F811
    engine, _ = here(tiny_folder)
    with pytest.raises(DataError, match=r"expected fewer than 64 tokens"):
        engine.add(Request(Prompt(0, "", (5,) * 64), 1, Sampling(), NoiseKey(3)))
    engine.add(request(0))
    with pytest.raises(CallError, match=r"prompt 0 is in flight"):
        engine.add(request(0))
    for going_on in (GoingOn(stops={0: 2}), GoingOn(keeps=frozenset({0})), GoingOn(parks=True)):
        with pytest.raises(CallError, match=r"set `partial_rollout` to off"):
            engine.add(Request(Prompt(4, "", (5,)), 1, Sampling(), NoiseKey(3), going_on=going_on))


def test_after_an_error_nothing_is_waited_for(tiny_folder: Path) -> None:  # noqa: F811
    engine, group = here(tiny_folder)
    engine.add(request(0, tokens=20))
    engine.advance("actor.generate")
    engine.give_up()
    assert not engine.has_work
    assert group.worker.said[-1] == "forget"
    engine.add(replace(request(0), in_turns=True))
    assert len(ask(engine)) == 2
    del group.worker.said[:]
    for _ in range(2):
        engine.give_up()
    assert group.worker.said == ["forget"], "nor for samples that wait for replies"


def faulty(fault: str, **keys: Any) -> Any:
    launcher = LocalProcesses(environment={"PLAIT_TEST_FAULT": fault}, **keys)
    return lambda loading, folder: launcher.start(Faulty, 1, arguments=(loading,), deadline_s=120.0)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("dies", r"vLLM's process for `actor` was killed by SIGKILL in `step` after [\d.]+ s"),
        ("raises", r"vLLM's process for `actor` raised MemoryError: no block is left in `step`"),
        ("hangs", r"vLLM's process for `actor` has not answered within the deadline of 0.5 s in `step`"),
    ],
)
def test_a_process_that_fails_is_named_with_its_last_words(
    tiny_folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    words: str,
) -> None:
    monkeypatch.setattr("plait.vllm.engine.CLOSE_S", 0.1)  # one that hangs does not end by itself
    engine = engine_of(tiny_folder, faulty(fault), answer_s=0.5 if fault == "hangs" else 60.0)
    (pid,) = engine.group.pids
    engine._is_behind = False
    engine.add(request(0))
    began = time.monotonic()
    with pytest.raises(RunError, match=words) as caught:
        engine.advance("actor.generate")
    assert time.monotonic() - began < 30.0
    assert "the last words of the engine" in str(caught.value)
    engine.give_up()
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_model_that_vllm_does_not_know_is_refused_before_work(tiny_folder: Path) -> None:  # noqa: F811
    launcher = LocalProcesses()
    with pytest.raises(
        ConfigError, match=r"`sampling.engine` is vllm, which cannot hold the model in .*no such archit"
    ):
        engine_of(
            tiny_folder, lambda loading, folder: launcher.start(Unready, 1, arguments=(loading,), deadline_s=60.0)
        )
