"""A generation engine without tensors: requests of known lengths, the decisions of `policy.batching`, no clock."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from plait.errors import ConfigError
from plait.policy.batching import Scheduler
from plait.policy.migration import Transfer
from plait.policy.step import Key, Limits, Start, StepKind


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of `prompt_tokens` with one sample for each of `lengths`, the response lengths in tokens."""

    uid: int
    prompt_tokens: int
    lengths: tuple[int, ...]
    prefix: tuple[Hashable, ...] = ()
    """A key for each full block of the prompt; none of a prompt that has none, or shares nothing."""
    contexts: tuple[tuple[Hashable, ...], ...] | None = None
    """A key for each full block of each sample's prompt and response but its last token, where the engine has a prefix
    cache."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of an engine does: samples and prompts computed, tokens through the model, tokens of them that were
    computed before it, and the samples that ended in it, as (prompt uid, index).
    """

    kind: StepKind
    num_sequences: int
    num_tokens: int
    num_context_tokens: int
    finished: tuple[Key, ...]


@dataclass(slots=True)
class Running:
    """A sample that is being decoded."""

    request: Request
    index: int
    generated: int

    @property
    def key(self) -> Key:
        return self.request.uid, self.index

    @property
    def length(self) -> int:
        """At which it ends."""
        return self.request.lengths[self.index]

    @property
    def tokens(self) -> int:
        """Tokens of prompt and response; all but the newest are computed."""
        return self.request.prompt_tokens + self.generated


class SimulatedEngine:
    """The decisions of an engine, in its order, from recorded lengths."""

    def __init__(self, limits: Limits):
        self.scheduler = Scheduler(limits)
        self._requests: dict[int, Request] = {}
        """Requests of which samples have not started."""
        self._started: dict[Key, Running] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def running(self) -> list[Running]:
        return [self._started[key] for key in self.scheduler.running]

    @property
    def num_waiting(self) -> int:
        return self.scheduler.sequences.num_waiting

    def add(self, request: Request) -> None:
        if any(length < 1 for length in request.lengths) or request.prompt_tokens < 1:
            raise ConfigError(f"request {request.uid}: expected a prompt and responses of at least one token")
        longest = request.prompt_tokens + max(request.lengths)
        if not self.scheduler.room.fits(longest):
            raise ConfigError(f"request {request.uid}: expected a pool of {longest} tokens at least")
        self._requests[request.uid] = request
        self.scheduler.add(request.uid, request.prompt_tokens, range(len(request.lengths)), request.prefix)

    def step(self) -> Step:
        """One step: a token more for what runs, prompts as places are free."""
        starts = self.scheduler.start_ready()
        finished = self._draw(self._begin(starts))
        plan = self.scheduler.plan()
        self._begin(plan.starts)
        finished += self._draw(plan.drawn)
        self._rest()
        return Step(plan.kind, plan.num_sequences, plan.num_tokens, plan.num_context_tokens, tuple(finished))

    def _begin(self, starts: Sequence[Start]) -> list[Key]:
        keys = [(start.uid, index) for start in starts for index in start.indices]
        for uid, index in keys:
            self._started[uid, index] = Running(self._requests[uid], index, 0)
        return keys

    def _draw(self, keys: Sequence[Key]) -> list[Key]:
        """A token more for each of these samples; returns those that have their length."""
        finished: list[Key] = []
        contexts: dict[Key, Sequence[Hashable]] = {}
        for key in keys:
            sample = self._started[key]
            sample.generated += 1
            if sample.generated == sample.length:
                finished.append(key)
                contexts[key] = sample.request.contexts[sample.index] if sample.request.contexts else ()
                del self._started[key]
        self.scheduler.remove(finished, contexts)
        return finished

    def _rest(self) -> None:
        """As the engine: without work and cached prefixes it begins anew."""
        if not self.has_work and not self.scheduler.blocks.num_cached:
            self.scheduler = Scheduler(self.scheduler.limits)

    def abort(self, uid: int, index: int | None = None) -> None:
        """Take a request's samples (or one of them) out, wherever they are."""
        waiting = [key for key in self.scheduler.sequences.waiting if key not in self._started]
        self._take_out([key for key in (*self._started, *waiting) if key[0] == uid and index in (None, key[1])])

    def _take_out(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._started.pop(key, None)
        self.scheduler.remove(keys)
        self._rest()

    def export(self, keys: Sequence[Key] | None = None) -> list[Running]:
        """Take running samples (all, if none are named) out, to be imported elsewhere."""
        out = [sample for sample in self.running if keys is None or sample.key in keys]
        self._take_out([sample.key for sample in out])
        return out

    def import_(self, sample: Running, transfer: Transfer) -> None:
        """Go on with a sample of another engine, whose keys and values came along or are computed again; those of
        its prompt are shared with samples of it that are here.
        """
        request = sample.request
        self._started[sample.key] = sample
        computed = self.scheduler.room.num_shared(request.prefix)
        if transfer is Transfer.KV:
            computed = max(computed, sample.tokens - 1)
        self.scheduler.add_started(sample.key, sample.tokens, computed, request.prefix)
