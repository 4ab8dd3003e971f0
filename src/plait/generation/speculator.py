"""An engine's own drafts: `speculation` hears the tokens of samples, and its drafts become the drafts of a step."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from plait.generation.checks import check_speculation
from plait.generation.decode_batch import NO_DRAFTS, Drafts
from plait.generation.draft_steps import DraftSteps
from plait.generation.forward import PACK_STEPS, Forward
from plait.generation.model_drafter import ModelDrafter
from plait.generation.pool import KVPool
from plait.generation.ragged import SHORT_ROWS
from plait.generation.response import Response
from plait.generation.sampler import SamplingRows, sample
from plait.generation.sampling import Sampling
from plait.generation.settings import MAX_DRAFT_TOKENS, SamplingSettings
from plait.generation.speculates import NoSpeculation, Quiet, Speculates
from plait.generation.steady_drafts import WhereSteady
from plait.kernels.noise import DrawNoise
from plait.models.compute.recurrent import recurrent_layers_of
from plait.models.language_model import LanguageModel
from plait.models.loading import load_model
from plait.policy.step import Key, StepPlan
from plait.speculation.acceptance import Learned
from plait.speculation.counts import MOST_PLACES, Counts
from plait.speculation.drafter import Asked, CostlyDrafter, Drafter, PoolDrafter
from plait.speculation.knowledge import Knowledge, knowledge_of, take_up
from plait.speculation.pool import least_bytes
from plait.speculation.probes import PROBES
from plait.speculation.promise import MAY_LOSE
from plait.speculation.speculation import How, Speculation

assert MOST_PLACES == MAX_DRAFT_TOKENS == SHORT_ROWS - 1, "a draft and the token before it are computed as few rows"


def speculator_of(settings: SamplingSettings, forward: Forward, *, keep_memory: bool) -> Speculates:
    """Makes drafts as the settings ask for; loads the draft model, if there is one.

    Args:
        forward: of the policy, or of this rank's part of it.
        keep_memory: of the draft model, see `engine.Engine`.

    Raises:
        ModelError: the draft model cannot be used. ConfigError: layers of the model are recurrent, and drafts are asked
            for.
    """
    how = settings.speculation
    check_speculation(settings, keeps_state=bool(recurrent_layers_of(forward.model.config)))
    if how == "off" or (how == "auto" and not forward.may_be_steady):
        return NoSpeculation()
    if how == "auto":
        made = lambda: _speculator("adaptive", settings, forward.model, keep_memory)
        steady = WhereSteady(made, lambda: forward.is_steady)
        if settings.draft_model is not None:
            steady.make()
        return steady
    return _speculator(how, settings, forward.model, keep_memory)


def _speculator(how: How, settings: SamplingSettings, model: LanguageModel, keep_memory: bool) -> Speculator:
    _load()
    if model.device.type == "cpu":  # kernels of GPUs are the same for one row and for several
        _load_draws(model.dtype)
    drafts = None
    if settings.draft_model is not None:
        dtype = str(model.dtype).removeprefix("torch.")
        drafts = model_drafter(
            load_model(settings.draft_model, dtype=dtype, device=model.device),
            vocabulary=model.config.get_text_config().vocab_size,
            num_blocks=settings.num_blocks(model.max_positions),
            most_tokens=settings.max_prefill_tokens,
            keep_memory=keep_memory,
        )
    return Speculator(how, PoolDrafter(settings.draft_pool_bytes), drafts, may_lose=settings.speculation_loss)


@functools.cache
def _load() -> None:
    """Load the compiled look-ups by using them on a made-up text. In the first step of all they would take the time of
    several steps, from which `adaptive` would conclude that looking up does not pay."""
    speculation = Speculation("adaptive", PoolDrafter(least_bytes()), clock=lambda: 0.0)
    slots, text = np.zeros(1, np.int64), np.arange(8, dtype=np.int64) % 4
    for other in range(4, 32):  # more than there is room for: some are dropped
        speculation.drafter.record((other,), text, np.ones(len(text)))
    speculation.begin(0, (0, 1, 2, 3))
    for _ in range(2 + PROBES):  # from then on it is asked what pays
        speculation.hear(slots, np.array([len(text)]), text, np.ones(len(text)))
        speculation.is_due(1, len(text))
        speculation.propose(Asked(slots, slots.astype(np.uint64), slots, slots > 0, slots + 8, ()), len(text))
        speculation.done(1, 0, len(text), 1, 1e-3)


@functools.cache
def _load_draws(dtype: torch.dtype) -> None:
    """Load the draws of several rows. A sample that runs alone needs them only with its first draft: loaded in that
    step, they would make it twice as long."""
    logits_BV = torch.zeros((2, 8), dtype=dtype)[:, :4]  # logits are padded: rows lie apart
    zeros_B = torch.zeros(2, dtype=torch.int64)
    sample(logits_BV, DrawNoise(zeros_B, zeros_B), SamplingRows.of([Sampling()] * 2, 4, zeros_B.device))


def model_drafter(
    model: LanguageModel, *, vocabulary: int, num_blocks: int, most_tokens: int = 4096, keep_memory: bool = True
) -> ModelDrafter:
    """A `ModelDrafter` whose forwards are measured and whose weights are packed for decoding; they do not change."""
    pool = KVPool()
    forward = Forward(model, pool, exact=False)
    forward.prepare(lambda: PACK_STEPS)
    steps = DraftSteps(forward, pool, vocabulary=vocabulary, num_blocks=num_blocks, keep_memory=keep_memory)
    steps.measure()
    return ModelDrafter(steps, most_tokens=most_tokens)


@dataclass(slots=True)
class _Heard:
    """A sample that speculation knows."""

    slot: int
    response: Response
    num_tokens: int = 0
    """Tokens of its response that speculation has been told."""


class Speculator:
    """`Speculates` by the texts and the draft model of this process.

    Args:
        how, drafter, model, may_lose: see `Speculation`.
    """

    def __init__(
        self, how: How, drafter: Drafter, model: CostlyDrafter | None = None, *, may_lose: float = MAY_LOSE
    ) -> None:
        self._model = model
        self.speculation = Speculation(
            how, drafter, lambda: time.perf_counter() - self.capturing_s, model=model, may_lose=may_lose
        )
        self.quiet: Quiet | None = self.speculation.due
        """See Speculates.quiet."""
        self._heard: dict[Key, _Heard] = {}
        self._free: list[int] = []
        self._num_slots = 0
        self._context = 0
        """Tokens of the running samples that were computed before the step."""
        self._running: Sequence[Key] = ()
        """The running samples of the last step."""
        self._asked = Asked(*(np.zeros(0, np.int64) for _ in range(5)), ())
        """What of them does not change from step to step."""

    @property
    def counts(self) -> Counts:
        return self.speculation.counts

    @property
    def capturing_s(self) -> float:
        """See Speculates.capturing_s."""
        return 0.0 if self._model is None else self._model.capturing_s

    def prepare(self) -> None:
        """See Speculates.prepare."""

    def drafts(self, started: Mapping[Key, Response], running: Sequence[Key]) -> Drafts:
        """See Speculates.drafts."""
        if running != self._running:
            self._running = list(running)
            self._meet(started, running)
        if not running or not self.speculation.is_due(len(running), self._context):
            return NO_DRAFTS
        self._hear()
        if self._part(started):
            self._meet(started, running)  # one of them may have come back since it was asked for
            self._hear()
        samples = [started[key] for key in running]
        same = self._asked
        places_B = np.array([len(sample.token_ids) for sample in samples])
        limits_B = np.array([sample.num_left - 1 for sample in samples])
        asked = Asked(same.slots_B, same.keys_B, places_B, same.greedy_B, limits_B, same.samplings)
        drafts = self.speculation.propose(asked, self._context)
        return {key: draft for key, draft in zip(running, drafts, strict=True) if draft}

    def done(self, plan: StepPlan, num_drawn: int, seconds: float) -> None:
        """See Speculates.done."""
        if plan.num_drafted == 0:
            heard = (self._heard.get(key) for key in plan.rows)
            self.speculation.not_computed(np.array([one.slot for one in heard if one is not None], np.int64))
        self._context = context = plan.num_row_context
        if plan.chunks or plan.starts:
            self.speculation.mixed(len(plan.rows), plan.num_drafted, context, seconds)
        else:
            self.speculation.done(len(plan.rows), plan.num_drafted, context, num_drawn, seconds)

    def rest(self) -> None:
        """See Speculates.rest."""
        self._running = ()
        self._hear()
        self._part({})

    def new_policy(self) -> None:
        """See Speculates.new_policy."""
        self._hear()
        self.speculation.grow_old()

    def recall(self, prompt_ids: tuple[int, ...], token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """See Speculates.recall."""
        if token_ids:
            self.speculation.drafter.record(prompt_ids, np.array(token_ids, np.int64), np.exp(np.array(logprobs)))

    def learned(self) -> Learned | None:
        """See Speculates.learned."""
        return self.speculation.acceptance.learned

    def learn(self, learned: Learned) -> None:
        """See Speculates.learn."""
        self.speculation.acceptance.take(learned)

    def knowledge(self) -> Knowledge | None:
        """See Speculates.knowledge: drafts of a fixed length need none."""
        return knowledge_of(self.speculation) if self.speculation.is_adaptive else None

    def take_up(self, knowledge: Knowledge) -> None:
        """See Speculates.take_up."""
        if self.speculation.is_adaptive:
            take_up(self.speculation, knowledge)

    def _meet(self, started: Mapping[Key, Response], running: Sequence[Key]) -> None:
        """Take up samples that are new in the batch, and set what does not change of all running ones."""
        for key in running:
            if key not in self._heard:
                self._begin(key, started[key])
            elif self._heard[key].response is not started[key]:
                self._hear()
                self._end(key)
                self._begin(key, started[key])
        samples, slots = [started[key] for key in running], [self._heard[key].slot for key in running]
        samplings = [sample.request.sampling for sample in samples]
        self._context = sum(len(sample.request.prompt.token_ids) + len(sample.token_ids) - 1 for sample in samples)
        self._asked = Asked(
            np.array(slots, np.int64),
            np.array([sample.noise_key for sample in samples], np.int64).view(np.uint64),
            np.zeros(len(slots), np.int64),
            np.array([sampling.temperature == 0 for sampling in samplings], bool),
            np.zeros(len(slots), np.int64),
            samplings,
        )

    def _hear(self) -> None:
        """Tell speculation the tokens that samples got since the last time."""
        slots, counts, token_ids, logprobs = [], [], [], []
        for heard in self._heard.values():
            response_ids = heard.response.token_ids
            if count := len(response_ids) - heard.num_tokens:
                slots.append(heard.slot)
                counts.append(count)
                token_ids += response_ids[heard.num_tokens :]
                logprobs += heard.response.logprobs[heard.num_tokens :]
                heard.num_tokens = len(response_ids)
        if slots:
            arrays = (np.array(column, np.int64) for column in (slots, counts, token_ids))
            self.speculation.hear(*arrays, np.exp(np.array(logprobs)))

    def _part(self, started: Mapping[Key, Response]) -> bool:
        """Forget samples that have ended; whether there were any."""
        ended = [key for key, heard in self._heard.items() if started.get(key) is not heard.response]
        for key in ended:
            self._end(key)
        return bool(ended)

    def _begin(self, key: Key, response: Response) -> None:
        if not self._free:
            self._free.append(self._num_slots)
            self._num_slots += 1
        self._heard[key] = heard = _Heard(self._free.pop(), response)
        self.speculation.begin(heard.slot, response.request.prompt.token_ids)

    def _end(self, key: Key) -> None:
        slot = self._heard.pop(key).slot
        self.speculation.end(slot)
        self._free.append(slot)
