"""The generation engine: continuous batching over a paged pool of keys and values, one ragged step at a time.

`policy.batching` decides each step; this file carries the decisions out. A group's prompt is computed once and its
blocks serve all its samples. What a sample says is a function of weights, prompt, parameters and noise key: not of who
else runs, of chunks, preemption or the order of arrival, up to the rounding of the forward; in exact mode to the bit.

Shapes: R rows whose logits are read, B samples that draw a token, H hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, KeysView, Sequence

import torch
from torch import Tensor

from plait.data.records import FinishReason, Sample
from plait.errors import CallError, ConfigError
from plait.generation import transfer
from plait.generation.checks import allow, check_kv, check_new, check_room, check_stages
from plait.generation.flight import InFlight
from plait.generation.forward import ChunkTokens, Forward
from plait.generation.pool import KVPool
from plait.generation.ragged import NewTokens
from plait.generation.records import Choose as Choose
from plait.generation.records import HeldKV as HeldKV
from plait.generation.records import StepRecord as StepRecord
from plait.generation.records import WeightUpdate as WeightUpdate
from plait.generation.request import Request
from plait.generation.response import PendingPrompt, Response
from plait.generation.rows import DecodeBatch
from plait.generation.sampler import SamplingRows, sample
from plait.generation.settings import SamplingSettings
from plait.generation.transfer import Place, SampleState
from plait.kernels import noise
from plait.models.language_model import LanguageModel
from plait.policy.batching import Scheduler
from plait.policy.blocks import prefix_keys
from plait.policy.step import Key, StepPlan


class Engine:
    """Steppable generation on one model.

    Args:
        model: its weights may change while no work is in flight, or between two steps; then call `update_weights`.
        settings: limits and mode of the engine; the rest of them travels with each request.
        policy_version: stamped on the tokens until `update_weights`.
        choose: draws the tokens.
        keep_memory: of packed weights, while nothing is in flight, for the next time. False where the process needs it
            for something else then. `pause(release=True)` gives it back in any case.

    Raises:
        ConfigError: exact mode on another device than a CPU.
    """

    def __init__(
        self,
        model: LanguageModel,
        settings: SamplingSettings,
        *,
        policy_version: int = 0,
        choose: Choose = sample,
        keep_memory: bool = True,
    ) -> None:
        if settings.exact and model.device.type != "cpu":
            raise ConfigError(
                f"sampling.exact: expected a model on the CPU, found {model.device.type}: only there are equal bits "
                "promised; set it to false, or `device` to cpu"
            )
        self.model = model
        self.policy_version = policy_version
        self.last_step: StepRecord | None = None
        self.updates: list[WeightUpdate] = []
        """Those with samples in flight."""
        self.is_paused = False
        self._settings = settings
        self._choose = choose
        self._keep_memory = keep_memory
        self._limits = settings.limits(model.max_positions)
        self._scheduler = Scheduler(self._limits)
        self._pool = KVPool(self._limits.block_tokens)
        self._rows = DecodeBatch(settings.max_running, self._limits.block_tokens, model.device)
        self._forward = Forward(model, self._pool, exact=settings.exact)
        self._place = Place.of(model)
        self._flight = InFlight(model.eos_token_ids)
        self._asked, self._started = self._flight.asked, self._flight.started
        self._weights_version = 0
        self._epoch = 0
        """Counts how often everything in flight was computed again."""

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def num_running(self) -> int:
        """Samples in the batch."""
        return len(self._scheduler.running)

    @property
    def started(self) -> KeysView[Key]:
        """Samples that have said something and not ended."""
        return self._started.keys()

    @property
    def num_waiting(self) -> int:
        """Samples that have not started, or wait to be computed again."""
        return self._scheduler.num_waiting

    @property
    def kv_bytes(self) -> int:
        """Memory of the pool."""
        return self._pool.num_bytes

    @property
    def received_bytes(self) -> int:
        """Activations that came from other ranks of the instance, so far."""
        return self.model.team.received_bytes

    @property
    def has_packed_weights(self) -> bool:
        """Whether a copy of the weights is held in another order."""
        return self._forward.has_packed_weights

    @property
    def not_compiled(self) -> str | None:
        """See `Forward.not_compiled`."""
        return self._forward.not_compiled

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """(tokens in blocks that somebody holds, tokens that the pool may hold)."""
        blocks = self._scheduler.blocks
        return blocks.num_held * self._limits.block_tokens, blocks.num_blocks * self._limits.block_tokens

    def add(self, request: Request) -> None:
        """Queue a request; `step` does the work.

        Raises:
            DataError: the prompt is empty or leaves no room for a response, or the pool is too small for both.
            CallError: samples of the prompt are in flight.
        """
        limits = tuple(request.limit(index, self.model.max_positions) for index in range(request.num_samples))
        uid, num_tokens = request.prompt.uid, len(request.prompt.token_ids)
        check_new(uid, self._asked, self._started)
        check_room(self._scheduler, uid, num_tokens, max(limits))
        self._begin_work()
        self._asked[uid] = PendingPrompt(request, limits, request.num_samples)
        self._scheduler.add(uid, num_tokens, range(request.num_samples), self._names(request))

    def _names(self, request: Request) -> tuple[bytes, ...] | None:
        """See `Scheduler.add`."""
        return prefix_keys(request.prompt.token_ids) if self._settings.prefix_cache_tokens else None

    def _begin_work(self) -> None:
        self._forward.work_added()
        if self.has_work:
            return
        if self._weights_version != self.model.weights_version:
            self._forget()
        self._weights_version = self.model.weights_version

    @torch.no_grad()
    def step(self) -> list[Sample]:
        """Compute one step: a token more for each running sample, and prompts as there are places.

        Returns:
            The samples that it finished.

        Raises:
            RunError: the model gave logits that are not finite.
            CallError: nothing is in flight, it is paused, or the weights changed without `update_weights`.
        """
        allow(self.has_work, "step: no sample is in flight; ask `has_work` first")
        allow(not self.is_paused, "step: the engine is paused; call `resume` first")
        version = self.model.weights_version
        same = version == self._weights_version
        allow(same, "step: the weights changed while samples were in flight; call `update_weights`")
        starts = self._scheduler.start_ready()
        early = [(start.uid, index) for start in starts for index in start.indices]
        finished = self._draw(early, 0, torch.cat(self._flight.begin(starts, self.policy_version))) if starts else []
        plan = self._scheduler.plan()
        self._apply(plan)
        began = time.perf_counter()
        self._forward.prepare(self._flight.longest_left)
        packing_s = time.perf_counter() - began
        logits_RV = self._computed(plan)
        logits_BV = self._drawn_logits(plan, logits_RV) if plan.chunks or plan.starts else logits_RV
        drawn = plan.drawn
        if logits_BV is not None:
            finished += self._draw(drawn, len(plan.rows), logits_BV)
        if not self.has_work:
            self._rest()
        self.last_step = StepRecord(
            plan.kind,
            plan.num_sequences,
            plan.num_tokens,
            plan.num_context_tokens,
            len(finished),
            plan.num_chunk_tokens,
            len(early) + len(drawn),
            len(plan.preempted),
            packing_s,
        )
        return finished

    def _apply(self, plan: StepPlan) -> None:
        """Blocks and rows as the plan has them before the forward; samples that start are known from here on."""
        running = self._scheduler.running
        self._rows.remove(plan.preempted)
        self._enter(plan.joined)
        self._rows.set_tables({key: running[key].table for key in plan.grown})
        assert self._rows.keys == list(plan.rows), "rows and decisions are about the same samples"
        self._pool.reserve(self._scheduler.blocks.num_touched, self._scheduler.blocks.num_blocks)
        self._pool.copy(plan.copies)

    def _enter(self, keys: Sequence[Key]) -> None:
        """Samples take rows behind the others."""
        if not keys:
            return
        samples = [self._started[key] for key in keys]
        tables = [self._scheduler.running[key].table for key in keys]
        numbers = [(s.token_ids[-1], len(s.tokens) - 1, s.noise_key, len(s.token_ids)) for s in samples]
        self._rows.append(keys, [s.request.sampling for s in samples], tables, numbers)

    def _computed(self, plan: StepPlan) -> Tensor | None:
        """Logits [R, V]: of each row, then of the chunks that complete a sequence, in the order of the plan."""
        chunks = [ChunkTokens(self._flight.chunk(chunk), chunk.completes) for chunk in plan.chunks]
        running = self._scheduler.running

        def newest() -> list[NewTokens]:
            return [self._flight.newest(key, running[key].table) for key in plan.rows]

        return self._forward.logits(self._rows, newest, chunks)

    # -- drawing

    def _drawn_logits(self, plan: StepPlan, logits_RV: Tensor | None) -> Tensor | None:
        """Logits [B, V] in the order of `plan.drawn`; those of a prompt are kept while samples of it have to start."""
        parts = [] if logits_RV is None else [logits_RV[: len(plan.rows)]]
        completing = [chunk for chunk in plan.chunks if chunk.completes]
        for i, chunk in enumerate(completing, len(plan.rows)):
            assert logits_RV is not None, "a chunk that completes a sequence is read"
            if chunk.index is None:
                asked = self._asked[chunk.uid]
                asked.logits_V, asked.logits_version = logits_RV[i], self.policy_version
            else:
                parts.append(logits_RV[i : i + 1])
        parts = [part for part in (*parts, *self._flight.begin(plan.starts, self.policy_version)) if len(part)]
        return torch.cat(parts) if parts else None

    def _draw(self, drawn: Sequence[Key], num_rows: int, logits_BV: Tensor) -> list[Sample]:
        """One token more for each of these samples, of which the first are the rows; returns those that it ends."""
        samples = [self._started[key] for key in drawn]
        noise_keys_B, places_B = (column[:num_rows] for column in self._rows.draws)
        if len(drawn) == num_rows:
            parameters = self._rows.parameters(logits_BV.shape[1])
        else:
            others = samples[num_rows:]
            numbers = [[s.noise_key for s in others], [len(s.token_ids) for s in others]]
            more = torch.tensor(numbers, dtype=torch.int64, device=noise_keys_B.device)
            noise_keys_B, places_B = torch.cat([noise_keys_B, more[0]]), torch.cat([places_B, more[1]])
            parameters = SamplingRows.of([s.request.sampling for s in samples], logits_BV.shape[1], logits_BV.device)
        draw_keys_B = noise.draw_keys(noise_keys_B, places_B)
        if not self._settings.exact:
            token_ids_B, logprobs_B = self._choose(logits_BV, draw_keys_B, parameters)
        else:  # sums over the vocabulary may be split by the number of rows, too
            each = [SamplingRows.of([s.request.sampling], logits_BV.shape[1], logits_BV.device) for s in samples]
            pairs = [self._choose(logits_BV[i : i + 1], draw_keys_B[i : i + 1], one) for i, one in enumerate(each)]
            token_ids_B, logprobs_B = (torch.cat(column) for column in zip(*pairs, strict=True))

        finished: list[Sample] = []
        ended: dict[Key, Response] = {}
        for said, token_id, logprob in zip(samples, token_ids_B.tolist(), logprobs_B.tolist(), strict=True):
            said.say(token_id, logprob)
            reason = said.end(self.model.tokenizer)
            if reason is not None:
                finished.append(said.sample(self.model.tokenizer, reason))
                ended[said.key] = self._started.pop(said.key)
        if num_rows:
            self._rows.advance(token_ids_B[:num_rows])
        if len(drawn) > num_rows:
            self._enter([key for key in drawn[num_rows:] if key not in ended])
        if ended:
            self._rows.remove(ended)
            cached = self._settings.prefix_cache_tokens > 0
            contexts = {key: prefix_keys(said.tokens[:-1]) for key, said in ended.items()} if cached else None
            self._scheduler.remove(ended, contexts)
        return finished

    # -- the open loop

    def abort(self, prompt_uid: int, index: int | None = None) -> list[Sample]:
        """Take a prompt's samples (or one of them) out; samples that have ended or never were are no error.

        Returns:
            The samples taken out, with what they had said: none of them will be delivered by `step`.
        """
        waiting = [key for key in self._scheduler.waiting if key not in self._started]
        out = self._flight.take_out(prompt_uid, index, waiting, self.policy_version)
        self._take_out([said.key for said in out])
        return [said.sample(self.model.tokenizer, FinishReason.ABORTED) for said in out]

    def _take_out(self, keys: Sequence[Key]) -> None:
        self._rows.remove(keys)
        self._scheduler.remove(keys)
        if not self.has_work:
            self._rest()

    def pause(self, *, release: bool = False) -> None:
        """No steps until `resume`; samples stay as they are.

        Args:
            release: give the memory of keys and values, and of packed weights, back; they are computed again.
        """
        self.is_paused = True
        if release:
            self._recompute()
            self._forget()
            self._forward.drop()

    def resume(self) -> None:
        self.is_paused = False

    def update_weights(self, version: int, kv: HeldKV = "recompute") -> None:
        """The model's weights have changed: stamp tokens from now on with `version`.

        Args:
            kv: of samples in flight. "recompute": from the new weights, as if they had been there from the start;
                "keep": what the old ones computed stays, which costs nothing and is not what the trainer will compute.
                Recorded in `updates`. Nothing of the old weights reaches later requests either way.

        Raises:
            CallError: `kv` is neither.
        """
        check_kv(kv)
        if self.has_work:
            self.updates.append(WeightUpdate(version, kv, len(self._started)))
            if kv == "recompute":
                self._recompute()
            else:
                self._scheduler.forget()
            for said in self._started.values():
                said.new_version(version)
            self._forward.drop(keep_memory=self._keep_memory)
        else:
            self._forget()
        self.policy_version = version
        self._weights_version = self.model.weights_version

    def export_sample(
        self,
        prompt_uid: int,
        index: int,
        *,
        since: int = 0,
        until: int | None = None,
        final: bool = True,
        out: Tensor | None = None,
    ) -> SampleState:
        """What another engine needs to go on with a sample that has started; see `generation.transfer`.

        Args:
            since: leave out keys and values of so many tokens, which an earlier call gave.
            until: leave out those from this token on; None: all that are held.
            final: take the sample out of this engine. False: it goes on, and a later call gives the rest.
            out: memory for the keys and values, as `SampleState.holdings` has them.

        Raises:
            CallError: the sample has not started, or has ended.
        """
        key = (prompt_uid, index)
        held = self._scheduler.find(key)
        if held is None:
            raise CallError(f"export_sample: sample {prompt_uid}.{index} has not started here, or has ended")
        state = transfer.export(
            self._started[key],
            held,
            self._pool,
            self._place,
            start=since,
            stop=until,
            epoch=self._epoch,
            policy_version=self.policy_version,
            out=out,
        )
        if final:
            del self._started[key]
            self._take_out([key])
        return state

    def num_shared(self, request: Request) -> int:
        """Tokens of the prompt whose keys and values are here, for an imported sample of it to share."""
        return self._scheduler.num_shared(request.prompt.uid, len(request.prompt.token_ids), self._names(request))

    def import_sample(self, *stages: SampleState, kv: HeldKV = "recompute") -> None:
        """Go on with a sample of another engine; `stages` are those of its export, their metadata the last one's.

        The blocks of its prompt are shared with the samples of it that are here, if all is of the same weights. What
        does not fit into the pool now, or was not sent, is computed again.

        Args:
            kv: where the source's policy version is another one than this engine's, what `update_weights` would have
                done to the sample. Recorded in `updates`.

        Raises:
            DataError: it is of another model or dtype, or too long for this pool.
            CallError: it is in flight here, `kv` is no choice, or the stages are not of one sample.
        """
        check_kv(kv)
        check_stages(stages, self._place)
        last = stages[-1]
        request, key = last.request, last.key
        allow(key not in self._started, f"import_sample: sample {key[0]}.{key[1]} is in flight already")
        allow(key[0] not in self._asked, f"import_sample: prompt {key[0]} is in flight already, and not all started")
        said = last.response(self.model.max_positions, self.model.eos_token_ids, self.policy_version)
        num_prompt, names = len(request.prompt.token_ids), self._names(request)
        check_room(self._scheduler, key[0], num_prompt, said.limit)
        self._begin_work()
        same_weights = last.policy_version == self.policy_version
        if not same_weights:
            self.updates.append(WeightUpdate(self.policy_version, kv, 1))
        is_current, held = last.is_current and same_weights, 0
        if same_weights or kv == "keep":
            held = transfer.contiguous(stages, self.num_shared(request) if is_current else 0)
        self._started[key] = said
        here = self._scheduler.add_started(key, num_prompt, len(said.tokens), held, names, is_current=is_current)
        if here is not None:
            self._pool.reserve(self._scheduler.blocks.num_touched, self._scheduler.blocks.num_blocks)
            found = self._scheduler.find(key)
            assert found is not None, "a sample that was added is there"
            transfer.write(stages, found.table, self._pool, self._place, here)

    # -- what is held

    def _recompute(self) -> None:
        self._epoch += 1
        self._scheduler.recompute()
        self._rows.clear()
        self._flight.forget_logits()

    def _rest(self) -> None:
        """No sample is in flight, so weights may change: give back what was made of them, but for cached prefixes."""
        if self._scheduler.blocks.num_cached:
            self._forward.drop(keep_memory=self._keep_memory)
        else:
            self._forget()

    def _forget(self) -> None:
        """Give all memory back; what samples in flight held was given up before."""
        self._pool.clear()
        if not self.has_work:
            self._scheduler = Scheduler(self._limits)
        self._forward.drop(keep_memory=self._keep_memory)


def drain(engine: Engine) -> Iterator[Sample]:
    """Step until no work is left; yield samples as they finish."""
    while engine.has_work:
        yield from engine.step()
