"""Steps that are launched before the host knows what the one before them drew, on a CPU that is taken for a device that
computes behind: the same samples, whatever comes and goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from plait.data.records import FinishReason
from plait.errors import RunError
from plait.generation import engine as engine_module
from plait.generation import joint, step_clock
from plait.generation.decode_batch import NO_DRAFTS, Drafts
from plait.generation.engine import Engine, drain
from plait.generation.response import Response
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.generation.speculates import NoSpeculation, Speculates
from plait.generation.speculator import Speculator
from plait.models.language_model import LanguageModel
from plait.policy.step import Key, StepPlan
from tests.cases import examples
from tests.generation.requests import request
from tests.generation.scripted_drafter import ScriptedDrafter
from tests.generation.test_engine import TEXTS, assert_same, assert_the_oracles, by_uid, request_of
from tests.models.tiny import shared_model
from tests.training.exact import ExactFloat64


def ahead_engine(model: LanguageModel, speculates: Speculates | None = None, **limits: int) -> Engine:
    """An engine whose device is taken for one that computes behind."""
    with mock.patch.object(engine_module, "computes_behind", return_value=True):
        return Engine(model, SamplingSettings(**limits), speculates=speculates)


class Sometimes(NoSpeculation):
    """Drafts in some steps, by what samples have said by then.

    Args:
        due: whether in each step, over and over.
        asked: called in these.
    """

    def __init__(self, due: Sequence[bool], asked: Callable[[], None] = lambda: None) -> None:
        self._due, self._asked, self._number = due, asked, 0
        self.quiet = self
        self.seconds: list[float] = []
        """Of steps, as they are told."""

    @property
    def is_quiet(self) -> bool:
        return not self._due[self._number % len(self._due)]

    def passes(self) -> None:
        assert self.is_quiet
        self._number += 1

    def drafts(self, started: Mapping[Key, Response], running: Sequence[Key]) -> Drafts:
        is_due = not self.is_quiet
        self._number += 1
        if not is_due:
            return NO_DRAFTS
        self._asked()
        return {key: [*started[key].token_ids[:1], 3, 5] for key in running}

    def done(self, plan: StepPlan, num_drawn: int, seconds: float) -> None:
        self.seconds.append(seconds)


# A prompt is computed beside samples in flight, of which one has ended: what is drawn in its row goes nowhere.
@example(
    order=[2, 4, 5, 3, 0, 1],
    taken=5,
    max_running=3,
    max_prefill_tokens=20,
    kv_tokens=128,
    pauses=[0, 6, 6, 0, 5, 0],
    due=[],
)
@settings(max_examples=examples(4, 30), deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    order=st.permutations(range(len(TEXTS))),
    taken=st.integers(1, len(TEXTS)),
    max_running=st.integers(1, 9),
    max_prefill_tokens=st.sampled_from([1, 20, 64]),
    kv_tokens=st.sampled_from([96, 128, 4096]),
    pauses=st.lists(st.integers(0, 6), min_size=len(TEXTS), max_size=len(TEXTS)),
    due=st.lists(st.booleans(), max_size=6),
)
def test_samples_are_the_oracles_whatever_ends(
    order: list[int],
    taken: int,
    max_running: int,
    max_prefill_tokens: int,
    kv_tokens: int,
    pauses: list[int],
    due: list[bool],
) -> None:
    """By stop tokens and strings, which nobody knows ahead, and by limits; in pools in which samples give way; with
    drafts in some steps, where `due` says so."""
    limits = {"max_running": max_running, "max_prefill_tokens": max_prefill_tokens, "kv_tokens": kv_tokens}
    engine = ahead_engine(shared_model("llama"), Sometimes(due) if due else None, **limits)
    assert_the_oracles(engine, "llama", order[:taken], pauses)
    assert engine.occupancy.kv_bytes == 0


class Watched:
    """What an engine launches and reads, in its order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        inner = joint.downloading

        def downloading(token_ids_D: object, logprobs_D: object) -> Callable[[], object]:
            number = sum(what == "drawn" for what, _ in self.events)
            self.events.append(("drawn", number))
            wait = inner(token_ids_D, logprobs_D)  # type: ignore[arg-type]

            def read() -> object:
                self.events.append(("read", number))
                return wait()

            return read

        with mock.patch.object(joint, "downloading", downloading):
            yield

    @property
    def num_ahead(self) -> int:
        """Steps that were launched before the one before them was read."""
        unread = list(accumulate(1 if what == "drawn" else -1 for what, _ in self.events))
        return sum(what == "drawn" and count > 1 for (what, _), count in zip(self.events, unread, strict=True))


def test_a_step_is_launched_before_the_one_before_it_is_read() -> None:
    engine, watched = ahead_engine(shared_model("llama")), Watched()
    engine.add(request(0, 5, lengths=(7, 7)))
    with watched.watching():
        ended = [len(engine.step()) for _ in range(7)]
    assert not engine.has_work
    assert ended == [0, 0, 0, 0, 0, 0, 2]
    # The prompt's step is read at once, so that its seconds are its own; the last one, whose samples end by their
    # limit, as well: no step can be launched in between.
    assert watched.events == [
        ("drawn", 0), ("read", 0), ("drawn", 1), ("drawn", 2), ("read", 1), ("drawn", 3), ("read", 2), ("drawn", 4),
        ("read", 3), ("drawn", 5), ("read", 4), ("drawn", 6), ("read", 5), ("read", 6),
    ]  # fmt: skip


def test_a_sample_that_ends_unforeseen_has_one_row_more() -> None:
    """Three samples, one of which stops early: one row that nobody needs, and none for those that reach their limit."""
    with ExactFloat64():
        free = by_uid(drain(_engine_with(3, Sampling(max_tokens=9, stop_token_ids=()))))
        stop = free["0.1"].token_ids[3]
        assert all(stop not in free[uid].token_ids for uid in ("0.0", "0.2"))
        engine = _engine_with(3, Sampling(max_tokens=9, stop_token_ids=(stop,)))
        num_tokens, samples = 0, []
        while engine.has_work:
            samples += engine.step()
            assert engine.last_step is not None
            num_tokens += engine.last_step.num_tokens - engine.last_step.num_prefill_tokens
    found = by_uid(samples)
    assert found["0.1"].token_ids == free["0.1"].token_ids[:4]
    assert found["0.1"].finish_reason is FinishReason.STOP
    assert found["0.0"].token_ids == free["0.0"].token_ids
    drawn = 9 + 4 + 9
    assert num_tokens == drawn - 3 + 1, "each first token is drawn from the prompt's logits; one row came to nothing"


def _engine_with(num_samples: int, sampling: Sampling) -> Engine:
    engine = ahead_engine(shared_model("llama"))
    engine.add(request_of(num_samples=num_samples, sampling=sampling))
    return engine


def test_samples_that_start_do_not_break_the_chain() -> None:
    """Two places for six samples of one prompt: who starts has its first token drawn behind the step in flight."""
    engine, watched = ahead_engine(shared_model("llama"), max_running=2), Watched()
    plain = Engine(shared_model("llama"), SamplingSettings(max_running=2))
    asked = request(0, 5, lengths=(6, 9, 5, 7, 8, 4))
    with ExactFloat64():
        plain.add(asked)
        wanted = by_uid(drain(plain))
        engine.add(asked)
        with watched.watching():
            found = by_uid(drain(engine))
    assert_same(found, wanted)
    pairs = zip(watched.events, watched.events[1:], strict=False)
    assert sum(a[0] == "drawn" and b == ("drawn", a[1] + 1) for a, b in pairs) > 4


def test_steps_with_prompts_stand_apart() -> None:
    """A step with a prompt is launched when all others have landed, and lands at once."""
    said: list[list[tuple[str, int]]] = []
    model = shared_model("llama")
    for engine in (Engine(model, SamplingSettings(max_prefill_tokens=8)), ahead_engine(model, max_prefill_tokens=8)):
        engine.add(request(0, 5, lengths=(14,)))
        steps = []
        for number in range(9):
            if number == 5:
                engine.add(request(1, 6, lengths=(8,)))
            engine.step()
            assert engine.last_step is not None
            steps.append((engine.last_step.kind.name, engine.last_step.num_drawn))
        said.append(steps)
    plain, launched = said
    assert plain == [("PREFILL", 1), *[("DECODE", 1)] * 4, ("PREFILL", 2), *[("DECODE", 2)] * 3]
    # The second step is launched, and read by the third; the one before the prompt's is read first in that.
    assert launched == [
        ("PREFILL", 1), ("DECODE", 0), *[("DECODE", 1)] * 3, ("PREFILL", 3), ("DECODE", 0), *[("DECODE", 2)] * 2
    ]  # fmt: skip


def test_after_a_step_that_failed_samples_can_be_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ahead_engine(shared_model("llama"))
    engine.add(request(0, 5, lengths=(9, 9)))
    for _ in range(3):
        engine.step()
    forward = engine.state.forward
    computed = forward.logits
    monkeypatch.setattr(forward, "logits", lambda *of: torch.full_like(computed(*of), torch.nan))
    engine.step()
    with pytest.raises(RunError, match="finite logits"):
        engine.step()
    first, second = engine.abort(0)
    assert len(first.token_ids) == len(second.token_ids) == 3
    assert not engine.has_work


@pytest.mark.parametrize("leave", ["abort", "halt", "update"])
def test_all_lands_before_samples_leave_or_weights_change(leave: str) -> None:
    engine = ahead_engine(shared_model("llama"))
    engine.add(request(0, 5, lengths=(20, 20)))
    for _ in range(6):
        engine.step()
    assert engine.said == {(0, 0): 5, (0, 1): 5}, "one token is on its way"
    if leave == "abort":
        (taken,) = engine.abort(0, 1)
        assert len(taken.token_ids) == 6
    elif leave == "halt":
        assert [len(sample.token_ids) for sample in engine.halt(parks=True)] == [6, 6]
        assert not engine.has_work
        return
    else:
        engine.update_weights(3)
        assert engine.said == {(0, 0): 6, (0, 1): 6}
    samples = by_uid(drain(engine))
    assert len(samples["0.0"].token_ids) == 20
    if leave == "update":
        assert samples["0.0"].versions == (0,) * 6 + (3,) * 14


def test_drafts_are_behind_tokens_that_are_known() -> None:
    """Who drafts by hand has all that was drawn before: nothing is launched ahead of a step with drafts."""
    with ExactFloat64():
        wanted = by_uid(drain(_plain()))["0.0"].token_ids
        engine = ahead_engine(shared_model("llama"))
        engine.add(request(0, 5, lengths=(20,)))
        for _ in range(4):
            engine.step()
        engine.land()
        said = engine.said[0, 0]
        engine.step({(0, 0): wanted[said : said + 3]})
        assert engine.said[0, 0] == said + 4, "three drafts and what is drawn behind them"
        assert by_uid(drain(engine))["0.0"].token_ids == wanted


def test_between_drafts_steps_are_launched_ahead() -> None:
    """In every fifth step it is asked for drafts, which knows all that was drawn; the others but the last go ahead."""
    watched, known = Watched(), list[bool]()

    def asked() -> None:
        whats = [what for what, _ in watched.events]
        known.append(whats.count("drawn") == whats.count("read"))

    engine = ahead_engine(shared_model("llama"), Sometimes([True, False, False, False, False], asked))
    engine.add(request(0, 5, lengths=(30,)))
    with watched.watching(), ExactFloat64():
        found = by_uid(drain(engine))
        assert found["0.0"].token_ids == by_uid(drain(_plain(30)))["0.0"].token_ids
    assert len(known) > 4
    assert all(known)
    assert watched.num_ahead > 12


def test_who_finds_nothing_to_draft_goes_ahead_between_looks() -> None:
    """`adaptive` looks in all steps at first, and then every few steps."""
    speculates, watched = Speculator("adaptive", ScriptedDrafter(lambda said, most: [])), Watched()
    engine = ahead_engine(shared_model("llama"), speculates)
    engine.add(request(0, 5, lengths=(60,)))
    with watched.watching(), ExactFloat64():
        found = by_uid(drain(engine))
        assert found["0.0"].token_ids == by_uid(drain(_plain(60)))["0.0"].token_ids
    assert watched.num_ahead > 5
    assert speculates.counts.steps == 59, "each step but that of the prompt is accounted for"


@pytest.mark.parametrize("due", [[], [False], [True, *[False] * 5]], ids=["off", "never", "sometimes"])
@pytest.mark.parametrize("kv_tokens", [96, 4096], ids=["gives way", "has room"])
def test_seconds_of_steps_add_up(due: list[bool], kv_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch takes 1 s of the host and 10 of the device. Whatever is launched ahead and whoever gives way, each
    second is of one step; a step ahead has those of the device, one that is waited for those of its launch, too."""
    now, ready, inner = [0.0], [0.0], joint.downloading

    def downloading(token_ids_D: object, logprobs_D: object) -> Callable[[], object]:
        wait, now[0] = inner(token_ids_D, logprobs_D), now[0] + 1.0  # type: ignore[arg-type]
        done = ready[0] = max(now[0], ready[0]) + 10.0

        def read() -> object:
            now[0] = max(now[0], done)
            return wait()

        return read

    monkeypatch.setattr(joint, "downloading", downloading)
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    speculates = Sometimes(due or [False])
    engine = ahead_engine(shared_model("llama"), speculates, max_running=4, kv_tokens=kv_tokens)
    samples = []
    for uid in range(3):
        engine.add(request(uid, 20, lengths=(12, 9)))  # a step with a prompt waits for those in flight
        for _ in range(6):
            samples += engine.step()
    samples += drain(engine)
    assert len(samples) == 6
    assert sum(speculates.seconds) == pytest.approx(now[0])
    plain = [seconds for seconds in speculates.seconds if seconds <= 11.0]
    assert len(plain) > 8
    assert min(plain) >= 10.0


def _plain(length: int = 20) -> Engine:
    engine = Engine(shared_model("llama"), SamplingSettings())
    engine.add(request(0, 5, lengths=(length,)))
    return engine


def test_nothing_goes_ahead_where_tokens_have_to_be_known() -> None:
    """Exact mode computes from the host's tokens, drafts are looked up behind them, and a CPU is not waited for."""
    model = shared_model("llama")
    with mock.patch.object(engine_module, "computes_behind", return_value=True):
        engines = [Engine(model, SamplingSettings(exact=True)), Engine(model, SamplingSettings(speculation=3))]
    for engine in (*engines, Engine(model, SamplingSettings())):
        watched = Watched()
        engine.add(request(0, 5, lengths=(6,)))
        with watched.watching(), ExactFloat64():
            list(drain(engine))
        whats = [what for what, _ in watched.events]
        assert whats == ["drawn", "read"] * (len(whats) // 2)
