"""A server that speaks as `plait.vllm.server` does, and computes with plait's own engine: no vLLM is needed.

Samples are then those of plait's own engine, up to the rounding of prompts that are computed one by one, if the adapter
asks for the right ones and brings the right weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from plait.data.records import FinishReason, Prompt, Reply, Sample
from plait.generation.engine import Engine
from plait.generation.request import GoingOn, Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.models.loading import load_model
from plait.runtime.prepare import SET_UP
from plait.vllm.messages import Ended, Loading, StoredWeights, Wanted
from plait.vllm.shared_weights import SharedReader


@dataclass(frozen=True)
class Given:
    """The noise of one sample, folded by who asked."""

    key: int
    rollout = 0

    def sample_key(self, prompt_uid: int, index: int) -> int:
        return self.key


class StandIn:
    """
    Args:
        context: of a launched worker; none where it is `Here`.
        heat: temperatures are multiplied by it: an engine that is off.
    """

    def __init__(self, context: Any, loading: Loading, *, heat: float = 1.0) -> None:
        self.model = load_model(loading.folder, dtype=loading.dtype)
        with torch.no_grad():
            self.model.weights.zero_()
        self._heat = heat
        self._engine = Engine(self.model, SamplingSettings(max_running=loading.max_running))
        self._wanted: dict[int, Wanted] = {}
        self.said: list[str] = []

    def update_weights(self, stored: StoredWeights) -> str:
        self.said.append("update_weights")
        reader = SharedReader(stored)
        state = {name: tensor.clone() for name, tensor in reader}
        missing = self.model.module.load_state_dict(state, strict=False).missing_keys
        tied = set(getattr(self.model.module, "_tied_weights_keys", None) or ())
        assert set(missing) <= tied, f"not written: {missing}"
        self._engine.update_weights(len(self.said))
        return reader.digest()

    def step(self, wanted: Sequence[Wanted]) -> list[Ended]:
        self.said.append(f"step {len(wanted)}")
        for one in wanted:
            uid = len(self._wanted)
            self._wanted[uid] = one
            sampling = Sampling(
                one.temperature * self._heat,
                one.top_k,
                one.top_p,
                one.limit,
                one.stop_token_ids,
                one.stop,
                greedy_logprobs_at=one.greedy_logprobs_at * self._heat,
            )
            prompt = Prompt(uid, "", one.prompt_ids)
            begun = (begun_before(one, prompt),) if one.begun_ids else ()
            self._engine.add(
                Request(prompt, 1, sampling, Given(one.noise_key), going_on=GoingOn(begun))  # type: ignore[arg-type]
            )
        return [self._ended(sample) for sample in (self._engine.step() if self._engine.has_work else [])]

    def _ended(self, sample: Sample) -> Ended:
        wanted = self._wanted[sample.prompt.uid]
        drawn = len(sample.all_ids) - len(wanted.begun_ids)
        stopped = sample.finish_reason is FinishReason.STOP
        return Ended(wanted.key, sample.token_ids[-drawn:], sample.logprobs[-drawn:], stopped)

    def forget(self) -> None:
        self.said.append("forget")
        for uid in self._wanted:
            self._engine.abort(uid)

    def rest(self) -> None:
        self.said.append("rest")


def begun_before(wanted: Wanted, prompt: Prompt) -> Sample:
    """The sample that goes on, one reply in front of its turn."""
    said, start = wanted.begun_ids, wanted.turn_start
    drawn = (said[0], *said[max(start, 1) :])
    replies = (Reply(1, said[1:start]),) if start else ()
    return Sample(prompt, 0, drawn, (-1.0,) * len(drawn), "", FinishReason.OPEN, replies=replies)


class Here:
    """A group of one worker in this process: what `LocalProcesses.start` gives, without a process."""

    num_ranks = 1

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.is_closed = False

    def submit(self, rank: int, method: str, *args: Any) -> Answer:
        return Answer(getattr(self.worker, method)(*args))

    def close(self, grace_s: float = 2.0) -> None:
        self.is_closed = True


@dataclass(frozen=True)
class Answer:
    value: Any

    def result(self, deadline_s: float) -> Any:
        return self.value


@contextmanager
def standing_in(monkeypatch: Any, **options: Any):
    """Within it runs with `sampling.engine` vllm have the stand-in; the groups that they opened."""
    opened: list[Here] = []

    def start(loading: Loading, folder: Path) -> Here:
        opened.append(Here(StandIn(None, loading, **options)))
        return opened[-1]

    with monkeypatch.context() as patched:
        patched.setattr("plait.workers.vllm_engines.start_vllm", lambda device, threads, freeze_after_s: start)
        patched.setitem(SET_UP, "vllm", lambda device: None)
        yield opened
