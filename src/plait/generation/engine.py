"""The generation engine: KV-cached continuous batching, one prefill or one decode step at a time.

`policy.batching` decides each step; this file carries the decisions out. A group's prompt is computed once and its keys
and values serve all its samples. What a sample says is a function of weights, prompt, parameters and noise key: not of
`max_running`, of who else runs, or of the order of arrival, up to the rounding of the forward.

Shapes: T tokens of a prefill, B rows of a batch, N samples that start, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from plait.data.packed import pack
from plait.data.records import FinishReason, Sample
from plait.errors import RunError
from plait.generation import noise
from plait.generation.attention import DecodeContext
from plait.generation.cache import PrefillKV, PromptKV, SlotCache, owned
from plait.generation.request import Request
from plait.generation.sampler import SamplingRows, sample
from plait.generation.settings import SamplingSettings
from plait.generation.stopping import completes_stop
from plait.models.attention import PackedContext
from plait.models.cpu_linear import PackedLinears
from plait.models.language_model import LanguageModel
from plait.policy import batching
from plait.policy.batching import StepKind

Value = TypeVar("Value")

SLOT_TOKENS = 256
"""A new slot has room for so many response tokens (or its limit, if lower) before it must grow."""

PACK_STEPS = 16
"""Decode steps before the weights are packed for those that follow. Packing costs about what so many steps gain by it:
nothing is lost to a short rollout, and little to one that ends soon after."""


@dataclass(frozen=True)
class StepRecord:
    """What a step did, for a timeline and a cost model."""

    kind: StepKind
    num_sequences: int
    """Prompts prefilled, or rows decoded."""
    num_tokens: int
    """Tokens that went through the model."""
    num_context_tokens: int
    """Tokens held before it by the sequences that it computed."""
    num_finished: int
    """Samples that ended in it."""


@dataclass
class _Waiting:
    """A request with samples that have not started."""

    request: Request
    limits: tuple[int, ...]
    pending: list[int]
    """Indices of these samples, ascending."""
    kv: PromptKV | None = None
    logits_V: Tensor | None = None
    """Of the last prompt token; with `kv` from the prefill until the last sample has started."""


@dataclass
class _Running:
    """A sample in the batch; its place in the list is its slot."""

    request: Request
    index: int
    limit: int
    key: int
    """`NoiseKey.sample_key` as int64."""
    stop_token_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Of the newest token, which the model has not seen yet."""
        return len(self.request.prompt.token_ids) + len(self.token_ids) - 1


class Engine:
    """Steppable generation on one model.

    Args:
        model: weights may change while no work is in flight; then call `update_weights`.
        settings: `max_running` and `max_prefill_tokens`; the rest of them travels with each request.
        policy_version: stamped on the samples until `update_weights`.
    """

    def __init__(self, model: LanguageModel, settings: SamplingSettings, *, policy_version: int = 0) -> None:
        self.model = model
        self.policy_version = policy_version
        self.last_step: StepRecord | None = None
        self._limits = batching.Limits(settings.max_running, settings.max_prefill_tokens)
        self._waiting: dict[int, _Waiting] = {}
        self._running: list[_Running] = []
        self._cache = SlotCache(settings.max_running)
        self._rows: tuple[SamplingRows, Tensor] | None = None
        self._weights_version = 0
        self._packed = PackedLinears(model.module)
        self._num_decodes = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        """Samples in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Samples that have not started."""
        return sum(len(waiting.pending) for waiting in self._waiting.values())

    @property
    def kv_bytes(self) -> int:
        """Memory of the slots."""
        return self._cache.num_bytes

    def add(self, request: Request) -> None:
        """Queue a request; `step` does the work.

        Raises:
            DataError: the prompt is empty or leaves no room for a response.
        """
        limits = tuple(request.limit(index, self.model.max_positions) for index in range(request.num_samples))
        uid = request.prompt.uid
        assert uid not in self._waiting, f"prompt {uid} is in flight already"
        assert all(running.request.prompt.uid != uid for running in self._running), f"prompt {uid} is in flight already"
        if not self.has_work:
            self._weights_version = self.model.trained_weights._version
        self._waiting[uid] = _Waiting(request, limits, list(range(request.num_samples)))

    @torch.no_grad()
    def step(self) -> list[Sample]:
        """Do one prefill or one decode step; return the samples that it finished.

        Raises:
            RunError: the model gave logits that are not finite.
        """
        assert self.has_work, "step without work"
        version = self.model.trained_weights._version
        assert version == self._weights_version, "the weights changed while samples were in flight"
        queue = (
            batching.WaitingPrompt(uid, len(w.request.prompt.token_ids), len(w.pending), w.kv is not None)
            for uid, w in self._waiting.items()
        )
        plan = batching.plan_step(queue, len(self._running), self._limits)
        num_sequences = num_tokens = num_context_tokens = 0
        if plan.prefill:
            num_sequences, num_tokens = len(plan.prefill), self._prefill([self._waiting[uid] for uid in plan.prefill])
        finished = self._start(plan.starts)
        for waiting in (self._waiting.get(uid) for uid in plan.prefill):
            if waiting is not None:  # has samples left to start: let go of the prefill that it is a view of
                waiting.kv, waiting.logits_V = owned(_required(waiting.kv)), _required(waiting.logits_V).clone()
        if plan.kind is StepKind.DECODE and self._running:
            num_sequences = num_tokens = len(self._running)
            num_context_tokens = sum(running.position for running in self._running)
            finished += self._decode()
        if not self.has_work:
            self._forget()
        self.last_step = StepRecord(plan.kind, num_sequences, num_tokens, num_context_tokens, len(finished))
        return finished

    def abort(self, prompt_uid: int, index: int | None = None) -> list[Sample]:
        """Take a prompt's samples (or one of them) out; samples that have ended or never were are no error.

        Returns:
            The samples taken out, with what they had said: none of them will be delivered by `step`.
        """
        slots = [
            slot
            for slot, running in enumerate(self._running)
            if running.request.prompt.uid == prompt_uid and index in (None, running.index)
        ]
        out = [self._running[slot] for slot in slots]
        self._leave(slots)
        waiting = self._waiting.get(prompt_uid)
        if waiting is not None:
            taken = [i for i in waiting.pending if index in (None, i)]
            waiting.pending = [i for i in waiting.pending if i not in taken]
            out += [self._begin(waiting, i) for i in taken]
            if not waiting.pending:
                del self._waiting[prompt_uid]
        if not self.has_work:
            self._forget()
        return [self._sample(running, FinishReason.ABORTED) for running in out]

    def update_weights(self, version: int) -> None:
        """The model's weights have changed: forget what the old ones computed, stamp later samples with `version`."""
        assert not self.has_work, "weights change only while no sample is in flight: drain or abort first"
        self._forget()
        self.policy_version = version

    def _forget(self) -> None:
        """Give back what was made of the weights as they are: no sample is in flight, so they may change."""
        self._cache.clear()
        self._packed.drop()
        self._num_decodes = 0

    def _prefill(self, prompts: Sequence[_Waiting]) -> int:
        """Compute prompts packed in one row; keep their keys, values and last logits. Returns the number of tokens."""
        batch = pack([(waiting.request.prompt.token_ids, ()) for waiting in prompts], device=self.model.device)
        computed = PrefillKV()
        last_N = torch.tensor([group.prompt.stop - 1 for group in batch.groups], device=self.model.device)
        context = PackedContext(batch, computed)
        hidden_TH = self.model.hidden(batch.token_ids_T, batch.position_ids_T, context, read=last_N)
        logits_NV = self.model.logits(hidden_TH[last_N])
        for waiting, group, logits_V in zip(prompts, batch.groups, logits_NV, strict=True):
            waiting.kv = computed.prompt(group.prompt)
            waiting.logits_V = logits_V
        return batch.num_tokens

    def _start(self, starts: Sequence[batching.Start]) -> list[Sample]:
        """Draw the first token of the samples that start now; those that it does not end get a slot."""
        if not starts:
            return []
        prompts = [self._waiting[start.uid] for start in starts]
        counts = [start.num_samples for start in starts]
        begun = [
            [self._begin(waiting, index) for index in waiting.pending[:count]]
            for waiting, count in zip(prompts, counts, strict=True)
        ]
        logits_PV = torch.stack([_required(waiting.logits_V) for waiting in prompts])
        logits_NV = logits_PV.repeat_interleave(torch.tensor(counts, device=logits_PV.device), dim=0)
        flat = [running for group in begun for running in group]
        self._draw(flat, logits_NV, *self._sampling_rows(flat, logits_NV.shape[1]))

        finished = []
        for waiting, group in zip(prompts, begun, strict=True):
            going = []
            for running in group:
                reason = self._ended(running)
                if reason is None:
                    going.append(running)
                else:
                    finished.append(self._sample(running, reason))
            self._occupy(going, _required(waiting.kv))
            waiting.pending = waiting.pending[len(group) :]
            if not waiting.pending:
                del self._waiting[waiting.request.prompt.uid]
        return finished

    def _begin(self, waiting: _Waiting, index: int) -> _Running:
        request = waiting.request
        stop_token_ids = request.sampling.stop_token_ids
        return _Running(
            request,
            index,
            limit=waiting.limits[index],
            key=noise.signed(request.noise.sample_key(request.prompt.uid, index)),
            stop_token_ids=frozenset(self.model.eos_token_ids if stop_token_ids is None else stop_token_ids),
        )

    def _occupy(self, going: Sequence[_Running], prompt: PromptKV) -> None:
        """Give slots behind the running ones to samples of one prompt and copy its keys and values there."""
        if not going:
            return
        first_slot = len(self._running)
        num_prompt = len(going[0].request.prompt.token_ids)
        longest = num_prompt + max(running.limit for running in going)
        self._running += going
        self._rows = None
        self._cache.reserve(len(self._running), min(longest, num_prompt + SLOT_TOKENS), self._longest())
        self._cache.write_prompt(first_slot, len(going), prompt)

    def _longest(self) -> int:
        """Tokens that the longest running sample may reach."""
        return max(len(running.request.prompt.token_ids) + running.limit for running in self._running)

    def _decode(self) -> list[Sample]:
        """One token more for every running sample."""
        positions = [running.position for running in self._running]
        self._cache.reserve(len(self._running), max(positions) + 1, self._longest())
        inputs = [[running.token_ids[-1] for running in self._running], positions]
        token_ids_B, positions_B = torch.tensor(inputs, device=self.model.device)
        context = DecodeContext(self._cache, positions, positions_B)
        self._num_decodes += 1
        if self._num_decodes == PACK_STEPS:
            self._packed.pack()
        with self._packed.applied():
            logits_BV = self.model.logits(self.model.hidden(token_ids_B, positions_B, context))
        if self._rows is None:
            self._rows = self._sampling_rows(self._running, logits_BV.shape[1])
        self._draw(self._running, logits_BV, *self._rows)

        ended = {
            slot: reason for slot, running in enumerate(self._running) if (reason := self._ended(running)) is not None
        }
        finished = [self._sample(self._running[slot], reason) for slot, reason in ended.items()]
        self._leave(ended)
        return finished

    def _sampling_rows(self, rows: Sequence[_Running], vocab_size: int) -> tuple[SamplingRows, Tensor]:
        """Parameters and sample keys [B] of a batch; they change only with its members."""
        device = self.model.device
        parameters = SamplingRows.of([running.request.sampling for running in rows], vocab_size, device)
        return parameters, torch.tensor([running.key for running in rows], device=device)

    def _draw(self, rows: Sequence[_Running], logits_BV: Tensor, parameters: SamplingRows, keys_B: Tensor) -> None:
        """Sample one token per row and append it."""
        places_B = torch.tensor([len(running.token_ids) for running in rows], device=keys_B.device)
        token_ids_B, logprobs_B = sample(logits_BV, noise.draw_keys(keys_B, places_B), parameters)
        for running, token_id, logprob in zip(rows, token_ids_B.tolist(), logprobs_B.tolist(), strict=True):
            if not math.isfinite(logprob):
                raise RunError(
                    f"sample {running.request.prompt.uid}.{running.index}: expected finite logits at response token "
                    f"{len(running.token_ids)}, found NaN or infinity: the weights are broken (a learning rate that is "
                    "too high?) or overflow in this dtype"
                )
            running.token_ids.append(token_id)
            running.logprobs.append(logprob)

    def _ended(self, running: _Running) -> FinishReason | None:
        """Whether and why the newest token is the last one."""
        if running.request.lengths is None:
            if running.token_ids[-1] in running.stop_token_ids:
                return FinishReason.STOP
            stop = running.request.sampling.stop
            if stop and completes_stop(self.model.tokenizer, running.token_ids, stop):
                return FinishReason.STOP
        return FinishReason.LENGTH if len(running.token_ids) == running.limit else None

    def _leave(self, slots: Collection[int]) -> None:
        """Free slots; the samples behind them move up into the gaps."""
        if not slots:
            return
        moves = batching.compaction(len(self._running), slots)
        if moves:
            self._cache.move(moves, max(self._running[source].position for source, _ in moves))
        for source, target in moves:
            self._running[target] = self._running[source]
        del self._running[len(self._running) - len(slots) :]
        self._rows = None

    def _sample(self, running: _Running, reason: FinishReason) -> Sample:
        return Sample(
            prompt=running.request.prompt,
            index=running.index,
            token_ids=tuple(running.token_ids),
            logprobs=tuple(running.logprobs),
            text=self.model.tokenizer.decode(running.token_ids, skip_special_tokens=True),
            finish_reason=reason,
            policy_version=self.policy_version,
        )


def drain(engine: Engine) -> Iterator[Sample]:
    """Step until no work is left; yield samples as they finish."""
    while engine.has_work:
        yield from engine.step()


def _required(value: Value | None) -> Value:
    assert value is not None, "a prompt that starts samples has been prefilled"
    return value
