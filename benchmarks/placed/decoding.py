"""One of several workers that decode: whole models side by side, or one model in stages, real or asleep."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from plait.data.records import Prompt
from plait.generation.engine import Engine
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.launch.worker_context import WorkerContext
from plait.layout.mesh import Layout
from plait.models.language_loading import load_model
from plait.models.parallel.partial import part_of
from plait.models.parallel.team import make_teams
from plait.policy.step import StepKind
from plait.workers.instances import engine_of

WAIT_S = 600.0
PROMPT_TOKENS = 8
VOCABULARY = 256
SAMPLING = Sampling(max_tokens=1024, stop_token_ids=())


@dataclass(frozen=True)
class Decoded:
    """Of one rank."""

    seconds: float
    """From all ready to its last token."""
    tokens: int
    """That its samples got."""
    step_s: float
    """Of a step that decodes, in the mean, without waiting: t of the closed form on its stage."""
    busy: float
    """Share of such steps in which it did not wait."""


class DecodeWorker:
    """Of one thread.

    Args:
        folder: of the model, whose layers are divided over all workers where it is in stages.
    """

    def __init__(self, context: WorkerContext, folder: str, dtype: str) -> None:
        torch.set_num_threads(1)
        count = context.num_ranks
        dist.init_process_group("gloo", store=context.store(), rank=context.rank, world_size=count)
        self._rank, self._folder, self._dtype = context.rank, folder, dtype
        self._stages = Layout.on(range(count), pp=count)
        self._team = make_teams([self._stages], context.rank, timeout_s=WAIT_S, waiting_for=context.waiting_for)[
            self._stages
        ]
        self._whole: Any = None
        self._part: Any = None

    def close(self) -> None:
        dist.destroy_process_group()

    def whole(self, samples: int, tokens: int, *, share: bool) -> Decoded | None:
        """Each worker has the whole model and an equal share of the samples, or the first has all of them."""
        if self._whole is None:
            self._whole = load_model(self._folder, dtype=self._dtype)
        dist.barrier()
        count = dist.get_world_size()
        if not share and self._rank > 0:
            return None
        mine = range(self._rank, samples, count) if share else range(samples)
        return decoded(Engine(self._whole, SamplingSettings(max_running=len(mine), speculation="off")), mine, tokens)

    def staged(self, samples: int, tokens: int, groups: int, sleep_s: float = 0.0) -> Decoded:
        """One model over all workers.

        Args:
            groups: of samples in flight.
            sleep_s: of a stage in each step, beside what it computes.
        """
        assert self._team is not None, "all workers are in it"
        if self._part is None:
            self._part = part_of(load_model(self._folder, dtype=self._dtype), self._team)
        model = self._part if sleep_s == 0 else Asleep(self._part, sleep_s)
        settings = SamplingSettings(max_running=samples, decode_groups=groups, speculation="off")
        engine = engine_of(model, settings, self._team)  # type: ignore[arg-type]
        dist.barrier()
        return decoded(engine, range(samples), tokens)


class Asleep:
    """A stage that takes longer than what it computes."""

    def __init__(self, model: Any, seconds: float) -> None:
        self._model, self._seconds = model, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def hidden(self, *arguments: Any, **options: Any) -> torch.Tensor:
        time.sleep(self._seconds)
        return self._model.hidden(*arguments, **options)


def decoded(engine: Engine, uids: range, tokens: int) -> Decoded:
    """A sample of each of these prompts, of so many tokens."""
    for uid in uids:
        token_ids = tuple((7 * at + 31 * uid) % (VOCABULARY - 5) + 3 for at in range(PROMPT_TOKENS))
        engine.add(Request(Prompt(uid, "", token_ids), 1, SAMPLING, NoiseKey(1), lengths=(tokens,)))
    began, drawn = time.perf_counter(), 0
    seconds: list[float] = []
    waited: list[float] = []
    while engine.has_work:
        step_began = time.perf_counter()
        engine.step()
        record = engine.last_step
        if record is None:
            continue
        drawn += record.num_drawn
        if record.kind is StepKind.DECODE:
            seconds.append(time.perf_counter() - step_began - record.packing_s)
            waited.append(record.waited_s)
    ended = time.perf_counter()
    busy_s = sum(seconds) - sum(waited)
    return Decoded(ended - began, drawn, busy_s / max(1, len(seconds)), busy_s / max(1e-9, sum(seconds)))
