"""Samples that leave an engine between two tokens, and go on in another: what either side does with its own state.

See `transfer` for what travels. Between processes `workers.sample_mover` does all of it. A prompt that an engine has
computed for others leaves in the same way, ahead of its samples. Samples that stand still between two versions of the
weights, and go on in the same engine, are parked (`parking`).
"""

from __future__ import annotations

from collections.abc import KeysView
from typing import TYPE_CHECKING

from torch import Tensor

from plait.data.records import Prompt
from plait.errors import CallError
from plait.generation import transfer
from plait.generation.checks import allow, check_kv, check_room, check_stages
from plait.generation.response import Response
from plait.generation.transfer import Place, SampleState
from plait.layout.caches import CacheShape
from plait.models.language_model import LanguageModel
from plait.policy.prompts_alone import is_computed
from plait.policy.sequences import Prompt as QueuedPrompt
from plait.policy.sequences import Started
from plait.policy.step import PROMPT, Key
from plait.schedule.update_rule import HeldKV

if TYPE_CHECKING:
    from plait.generation.state import EngineState


class SampleMoves:
    """The way out of an engine and into it, between its steps.

    Args:
        state: of the engine (`Engine.state`).
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self.place = Place.of(state.model)

    @property
    def model(self) -> LanguageModel:
        return self._state.model

    @property
    def cut_shape(self) -> CacheShape | None:
        """What an instance of several ranks keeps of a token; None: it is one, or it cannot be said."""
        part = self.model.part
        return None if part is None or part.cache is None else self.place.shape(self._state.pool)

    @property
    def policy_version(self) -> int:
        return self._state.flight.policy_version

    @property
    def started(self) -> KeysView[Key]:
        """Samples that have said something and not ended: those that can move."""
        return self._state.flight.started.keys()

    def may_leave(self, key: Key) -> bool:
        """Whether it is a sample that can move, or a prompt that was computed for others."""
        prompt = self._state.scheduler.sequences.prompts.get(key[0]) if key[1] == PROMPT else None
        return key in self.started or (prompt is not None and is_computed(prompt))

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
            index: of the sample; PROMPT: the prompt itself, with all its samples, of which none has started.
            since: leave out keys and values of so many tokens, which an earlier call gave.
            until: leave out those from this token on; None: all that there are.
            final: take the sample out of this engine. False: it goes on, and a later call gives the rest.
            out: memory for the keys and values: [elements] in the pool's dtype, as `SampleState.holdings` has them;
                None: it is taken anew.

        Raises:
            CallError: the sample has not started, or has ended.
        """
        state, key = self._state, (prompt_uid, index)
        sample = self._find(key)
        if sample is None:
            raise CallError(f"export_sample: sample {prompt_uid}.{index} has not started here, or has ended")
        count = sample.num_computed_tokens
        start = min(since, count)
        stop = count if until is None else max(start, min(until, count))
        response, shape = self._response(key), self.place.shape(state.pool)
        exported = SampleState(
            response.request,
            index,
            tuple(response.token_ids),
            tuple(response.logprobs),
            tuple(response.version_starts),
            num_computed_tokens=count,
            epoch=state.epoch,
            policy_version=state.flight.policy_version,
            is_current=sample.is_current,
            shape=shape,
            model=self.place.fingerprint,
            start=start,
            stop=stop,
            kv=transfer.read(shape, sample.table, state.pool, self.place, (start, stop), out),
            supports=tuple(response.supports),
        )
        if isinstance(sample, Started):
            if final:
                del state.flight.started[key]
                state.take_out([key])
        elif final:
            del state.flight.pending[prompt_uid]
            state.take_out([(prompt_uid, fresh) for fresh in sample.pending])
        return exported

    def _find(self, key: Key) -> Started | QueuedPrompt | None:
        sequences = self._state.scheduler.sequences
        return sequences.prompts.get(key[0]) if key[1] == PROMPT else sequences.find(key)

    def _response(self, key: Key) -> Response:
        """What a sample has said; of a prompt, what each of its samples has."""
        flight = self._state.flight
        if key[1] != PROMPT:
            return flight.started[key]
        return Response.begun(flight.pending[key[0]], 0, (), (flight.policy_version, flight.policy_version))

    def num_shared(self, prompt: Prompt) -> int:
        """Tokens of the prompt whose keys and values are here, for an imported sample of it to share."""
        return self._state.scheduler.room.num_shared(self._state.pool.names(prompt.token_ids))

    def import_sample(self, *stages: SampleState, kv: HeldKV = "recompute") -> None:
        """Go on with a sample of another engine; `stages` are those of its export, their metadata the last one's.

        The blocks that its prompt begins with are shared with who is here, if all is of the same weights. What does not
        fit into the pool now, or was not sent, is computed again; so is all where layers are recurrent, whose
        states are not sent.

        Args:
            kv: where the source's policy version is another one than this engine's, what `Engine.update_weights` would
                have done to the sample.

        Raises:
            DataError: it is of another model or dtype, or too long for this pool.
            CallError: it is in flight here, `kv` is no choice, or the stages are not of one sample.
        """
        check_kv(kv)
        check_stages(stages, self.place)
        state, flight, last = self._state, self._state.flight, stages[-1]
        request, key = last.request, last.key
        allow(key not in flight.started, f"import_sample: sample {key[0]}.{key[1]} is in flight already")
        allow(key[0] not in flight.pending, f"import_sample: prompt {key[0]} is in flight already, and not all started")
        response = last.response(state.model.max_positions, state.model.eos_token_ids, flight.policy_version)
        check_room(state.scheduler, key[0], len(request.prompt.token_ids), response.limit)
        state.expect_work()
        same_weights = last.policy_version == flight.policy_version
        is_current, computed = last.is_current and same_weights, 0
        if (same_weights or kv == "keep") and state.pool.states is None:
            computed = transfer.contiguous(stages, self.num_shared(request.prompt) if is_current else 0)
        flight.started[key] = response
        names = state.pool.names(request.prompt.token_ids)
        here = state.scheduler.add_started(
            key, len(response.tokens), computed, names, is_current=is_current, rollout=request.noise.rollout
        )
        if here is not None:
            state.reserve()
            sample = state.scheduler.sequences.find(key)
            assert sample is not None, "a sample that was added is there"
            transfer.write(stages, sample.table, state.pool, self.place, here)

    def import_prompt(self, *stages: SampleState) -> None:
        """Bring keys and values of a prompt, whose request was added here, and of which nothing is computed yet. What
        does not fit into the pool now, or is of other weights, is computed here, and the last token in any case.

        Args:
            stages: of its export, as of `import_sample`.

        Raises:
            DataError: it is of another model or dtype.
            CallError: the stages are not of one prompt.
        """
        check_stages(stages, self.place)
        state, last = self._state, stages[-1]
        prompt = state.scheduler.sequences.prompts[last.key[0]]
        if not last.is_current or last.policy_version != state.flight.policy_version:
            return
        computed = transfer.contiguous(stages, self.num_shared(last.request.prompt))
        here = state.scheduler.room.bring(prompt, min(computed, prompt.num_tokens - 1), is_current=True)
        if here is not None:
            state.reserve()
            transfer.write(stages, prompt.table, state.pool, self.place, here)
