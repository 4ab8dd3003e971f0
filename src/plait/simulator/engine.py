"""A generation engine without tensors: requests of known lengths, the decisions of `policy.batching`, no clock."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from plait.errors import ConfigError
from plait.policy.batching import Batcher
from plait.policy.migration import Transfer
from plait.policy.step import Key, Limits, Start, StepKind


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of `prompt_tokens` with one sample for each of `lengths`, the response lengths in tokens."""

    uid: int
    prompt_tokens: int
    lengths: tuple[int, ...]
    prefix: tuple[Hashable, ...] | None = None
    """A key for each full block of the prompt, where the engine has a prefix cache."""
    contexts: tuple[tuple[Hashable, ...], ...] | None = None
    """Of each sample a key for each full block of prompt and response but its last token, where it has one."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of an engine does: samples and prompts computed, tokens through the model, tokens held before it,
    and the samples that ended in it, as (prompt uid, index).
    """

    kind: StepKind
    num_sequences: int
    num_tokens: int
    num_context_tokens: int
    finished: tuple[Key, ...]


@dataclass(slots=True)
class Running:
    """A sample that is being decoded."""

    uid: int
    index: int
    prompt_tokens: int
    length: int
    generated: int
    context: tuple[Hashable, ...] = ()
    """See `Request.contexts`."""

    @property
    def tokens(self) -> int:
        """Of prompt and response; all but the newest are held."""
        return self.prompt_tokens + self.generated


class SimulatedEngine:
    """The decisions of an engine, in its order, from recorded lengths."""

    def __init__(self, limits: Limits):
        self.batcher = Batcher(limits)
        self._requests: dict[int, Request] = {}
        """Of which samples have not started."""
        self._started: dict[Key, Running] = {}

    @property
    def has_work(self) -> bool:
        return self.batcher.has_work

    @property
    def running(self) -> list[Running]:
        return [self._started[key] for key in self.batcher.running]

    @property
    def num_waiting(self) -> int:
        return self.batcher.num_waiting

    def add(self, request: Request) -> None:
        if any(length < 1 for length in request.lengths) or request.prompt_tokens < 1:
            raise ConfigError(f"request {request.uid}: expected a prompt and responses of at least one token")
        longest = request.prompt_tokens + max(request.lengths)
        if not self.batcher.fits(longest):
            raise ConfigError(f"request {request.uid}: expected a pool of {longest} tokens at least")
        self._requests[request.uid] = request
        self.batcher.add(request.uid, request.prompt_tokens, range(len(request.lengths)), request.prefix)

    def step(self) -> Step:
        """One step: a token more for what runs, prompts as places are free."""
        starts = self.batcher.start_ready()
        finished = self._draw(self._begin(starts))
        plan = self.batcher.plan()
        self._begin(plan.starts)
        finished += self._draw(plan.drawn)
        return Step(plan.kind, plan.num_sequences, plan.num_tokens, plan.num_context_tokens, tuple(finished))

    def _begin(self, starts: Sequence[Start]) -> list[Key]:
        keys = [(start.uid, index) for start in starts for index in start.indices]
        for uid, index in keys:
            request = self._requests[uid]
            context = request.contexts[index] if request.contexts else ()
            self._started[uid, index] = Running(uid, index, request.prompt_tokens, request.lengths[index], 0, context)
        return keys

    def _draw(self, keys: Sequence[Key]) -> list[Key]:
        """A token more for each of these samples; returns those that have their length."""
        finished: dict[Key, tuple[Hashable, ...]] = {}
        for key in keys:
            sample = self._started[key]
            sample.generated += 1
            if sample.generated == sample.length:
                finished[key] = sample.context
                del self._started[key]
        self.batcher.remove(finished, finished)
        return list(finished)

    def export(self) -> list[Running]:
        """Take all running samples out, to be imported elsewhere."""
        out = self.running
        self.batcher.remove([(sample.uid, sample.index) for sample in out])
        for sample in out:
            del self._started[sample.uid, sample.index]
        return out

    def import_(self, sample: Running, transfer: Transfer) -> None:
        """Go on with a sample of another engine, whose keys and values came along or are computed again."""
        key = (sample.uid, sample.index)
        self._started[key] = sample
        held = sample.tokens - 1 if transfer is Transfer.KV else 0
        self.batcher.add_started(key, sample.prompt_tokens, sample.tokens, held)
