"""vLLM as a generation engine of the leader: requests go to its process, finished samples come back."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from plait.data.records import FinishReason, Sample, turn_start
from plait.engines import Traits
from plait.errors import CallError, ConfigError, RunError, cause_of
from plait.generation.checks import check_new
from plait.generation.refused import Refusals
from plait.generation.request import Request
from plait.generation.response import Response
from plait.launch.failures import Ended as HowEnded
from plait.launch.failures import WorkerError
from plait.launch.group import Handle
from plait.policy.step import Key
from plait.schedule.work import Done
from plait.temporary_folder import TemporaryFolder
from plait.vllm.messages import Ended, Loading, Wanted
from plait.vllm.process import Start, last_words
from plait.vllm.shared_weights import shared

ANSWER_S = 600.0
"""For a few steps, or new weights."""
CLOSE_S = 2.0


class VllmEngine:
    """`engines.GenerationEngine` over vLLM in a process of its own.

    The model's weights are brought there before the first sample that is asked for after they changed. What is asked
    for while vLLM computes joins after the steps under way; which samples are computed together follows from what was
    asked for, and when, by the count of steps.

    Args:
        role: that it generates for, in messages.
        model: the trainer's; the whole of it is here.
        weights: reads it, by names in Transformers, each in its shape, on the CPU.
        loading: what vLLM is to make room for.
        start: starts vLLM.
        answer_s: seconds for an answer, after which vLLM counts as stalled.

    Raises:
        ConfigError: vLLM cannot hold the model.
        RunError: its process died, or was not ready in time.
    """

    moves = None
    refusals = Refusals()
    speculation = None
    traits = Traits(num_instances=1, keeps_weights=False, shares_devices=False, tells_lengths=False)
    said: Mapping[Key, int] = {}

    def __init__(
        self,
        role: str,
        model: Any,
        weights: Callable[[], dict[str, Tensor]],
        loading: Loading,
        start: Start,
        *,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.model = model
        self.policy_version = 0
        self._role, self._weights, self._max_tokens = role, weights, loading.max_tokens
        self._answer_s = answer_s
        self._is_behind = True
        """The role's weights have changed since vLLM got them."""
        self._waiting: list[Wanted] = []
        """Asked for, and not told to vLLM."""
        self._responses: dict[Key, Response] = {}
        """Unfinished samples, without what vLLM has drawn."""
        self._steps: Handle | None = None
        """That vLLM computes now."""
        self._in_turns = False
        """Samples that have ended may go on: vLLM finds their keys and values again."""
        self._folder = TemporaryFolder("vllm")
        try:
            self.group = start(loading, self._folder.path)
            """vLLM's process, a group of one."""
        except WorkerError as error:
            self._folder.close()
            if error.failure.ended is HowEnded.RAISED:
                what = cause_of(error.__cause__) if error.__cause__ is not None else error.failure.cause
                raise ConfigError(
                    f"`sampling.engine` is vllm, which cannot hold the model in {Path(loading.folder)}: {what}; take "
                    f"another `model`, or set `sampling.engine` to plait\n{last_words(error.failure)}"
                ) from error
            self._raise(error)

    @property
    def has_work(self) -> bool:
        return bool(self._responses)

    @property
    def ready(self) -> bool:
        """It waits for vLLM itself, a few steps at a time."""
        return self.has_work

    @property
    def running(self) -> tuple[int, ...]:
        return (len(self._responses),)

    @property
    def at_work(self) -> frozenset[int]:
        return frozenset({0} if self._responses else ())

    def add(self, request: Request) -> None:
        """See GenerationEngine. A sample that continues is prefilled with all of its tokens.

        Raises:
            DataError: the prompt is empty or leaves no room for a response.
            CallError: samples of the prompt are in flight, or are to stop before they end.
        """
        going_on, version = request.going_on, self.policy_version
        if going_on.stops or going_on.keeps or going_on.parks:
            raise CallError("vLLM's samples end with the weights that they began with; set `partial_rollout` to off")
        check_new(request, (), self._responses)
        self._in_turns |= request.in_turns
        begun = {sample.index: sample for sample in going_on.begun}
        for index in request.indices:
            limit, eos_token_ids = request.limit(index, self._max_tokens), self.model.eos_token_ids
            if index in begun:
                response = Response.resumed(request, begun[index], limit, eos_token_ids, version)
            else:
                response = Response.of(request, index, limit, eos_token_ids, [(0, version)])
            self._waiting.append(_wanted(response))
            self._responses[response.key] = response

    def advance(self, call: str) -> tuple[Done, list[Sample]]:
        """A few steps of vLLM. It goes on with the next ones while the caller does something else.

        Raises:
            RunError: vLLM died or does not answer, its log-probs are not finite, or it read other weights than were
                written.
        """
        assert self.has_work, "step without work"
        self._bring_weights()
        ended = self._result(self._steps or self._begin_steps())
        self._steps = None
        samples = [self._sample(response) for response in ended]
        if self._responses:
            self._steps = self._begin_steps()
        elif not self._in_turns:
            self._submit("rest")
        num_tokens = sum(len(response.token_ids) for response in ended)
        return Done(f"{call}/decode", "DECODE", tokens=num_tokens, units=len(samples)), samples

    def halt(self, *, parks: bool) -> None:
        """See GenerationEngine; recipes that ask for it are refused. Raises CallError."""
        raise CallError("vLLM's samples end with the weights that they began with; set `partial_rollout` to off")

    def end_turns(self) -> None:
        """See GenerationEngine: keys and values that vLLM found again until now are forgotten. Raises RunError as
        `advance`."""
        self._in_turns = False
        self._submit("rest")

    def update_weights(self, version: int) -> None:
        """See GenerationEngine: vLLM gets them with the next sample that is asked for."""
        assert not self.has_work, "weights change only while no sample is in flight"
        self.policy_version = version
        self._is_behind = True

    def give_up(self) -> None:
        """Forget all samples, and the state of those that might have had a further turn: nobody waits for them."""
        if not (self.has_work or self._in_turns):
            return
        self._responses.clear()
        self._waiting.clear()
        self._steps, self._in_turns = None, False
        with contextlib.suppress(RunError):  # it is gone
            self._submit("forget")

    def close(self) -> None:
        """End vLLM's process. Harmless when done before."""
        self.group.close(grace_s=CLOSE_S)
        self._folder.close()

    # -- what is said to vLLM

    def _begin_steps(self) -> Handle:
        waiting, self._waiting = self._waiting, []
        return self._submit("step", waiting)

    def _submit(self, method: str, *args: Any) -> Handle:
        try:
            return self.group.submit(0, method, *args)
        except WorkerError as error:
            self._raise(error)

    def _result(self, handle: Handle) -> Any:
        try:
            return handle.result(self._answer_s)
        except WorkerError as error:
            self._raise(error)

    def _bring_weights(self) -> None:
        """Have vLLM load the weights as they are, where they have changed."""
        if not self._is_behind:
            return
        try:
            with shared(self._weights()) as (stored, written):
                read = self._result(self._submit("update_weights", stored))
        except OSError as error:
            raise RunError(
                f"the weights of `{self._role}` cannot be brought to vLLM: {os.strerror(error.errno or 0)}"
            ) from error
        if read != written:
            raise RunError(
                f"vLLM holds other weights of `{self._role}` than the trainer: the hash of what was written is "
                f"{written[:16]}, of what it read {read[:16]}; set `sampling.engine` to plait"
            )
        self._is_behind = False

    def _sample(self, ended: Ended) -> Sample:
        response = self._responses.pop(ended.key)
        if not all(map(math.isfinite, ended.logprobs)) or len(ended.logprobs) != len(ended.token_ids):
            raise RunError(
                f"sample {ended.key[0]}.{ended.key[1]}: expected finite logits at each of {len(ended.token_ids)} "
                "tokens, found NaN or infinity in vLLM: the weights are broken (a learning rate that is too high?) or "
                "overflow in this dtype"
            )
        response.token_ids += ended.token_ids
        response.logprobs += ended.logprobs
        return response.sample(self.model.tokenizer, FinishReason.STOP if ended.stopped else FinishReason.LENGTH)

    def _raise(self, error: WorkerError) -> NoReturn:
        """The failure in words of this engine."""
        failure = error.failure
        doing = f" in `{failure.action}` after {failure.seconds:.1f} s" if failure.action else ""
        raise RunError(
            f"vLLM's process for `{self._role}` {failure.cause}{doing}\n{last_words(failure)}".rstrip()
        ) from error


def _wanted(response: Response) -> Wanted:
    """A sample as vLLM is asked for it."""
    request, sampling = response.request, response.request.sampling
    is_replayed = request.lengths is not None
    assert not any((sampling.keeps_support, sampling.min_p)), "a recipe that asks vLLM for it is refused"
    return Wanted(
        key=response.key,
        prompt_ids=tuple(request.prompt.token_ids),
        begun_ids=tuple(response.token_ids),
        turn_start=turn_start(response.replies),
        limit=response.limit,
        stop_token_ids=() if is_replayed else tuple(sorted(response.stop_token_ids)),
        stop=() if is_replayed else sampling.stop,
        noise_key=response.noise_key,
        temperature=sampling.temperature,
        greedy_logprobs_at=sampling.greedy_logprobs_at,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
    )
