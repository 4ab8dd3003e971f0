"""One of two workers that train two models: what it computes in each arrangement, and how long both took."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import Rows
from plait.launch.worker_context import WorkerContext
from plait.layout.mesh import Layout
from plait.models.language_loading import load_model
from plait.models.parallel.partial import part_of
from plait.models.parallel.team import Team, make_teams
from plait.models.scalar_loading import scalar_of
from plait.schedule.fused import fused_order
from plait.schedule.plan import Placement
from plait.schedule.schedule import Schedule
from plait.schedule.timeline import Span
from plait.schedule.work import Work
from plait.training.mini_batch import LossCall, LossTerm
from plait.training.settings import OptimizerSettings
from plait.training.together import train_together
from plait.training.trainer import Trainer
from plait.training.trainer_settings import ExecutionSettings, SampleSettings, UpdateSettings

ROLES = ("actor", "critic")
WAIT_S = 600.0
VOCABULARY = 256

PLACES: Mapping[str, Mapping[str, Layout]] = {
    "1F1B": {"actor": Layout.on((0, 1), pp=2), "critic": Layout.on((0, 1), pp=2)},
    "together": {"actor": Layout.on((0, 1), pp=2), "critic": Layout.on((1, 0), pp=2)},
    "dp": {"actor": Layout.on((0, 1), dp=2), "critic": Layout.on((0, 1), dp=2)},
    "one each": {"actor": Layout.on((0,)), "critic": Layout.on((1,))},
}


def policy_loss(batch: Any) -> torch.Tensor:
    return batch.aggregate(-batch.logprobs, "token-mean")


def value_loss(batch: Any) -> torch.Tensor:
    return batch.aggregate((batch.values - 1) ** 2, "token-mean")


LOSSES = {"actor": LossCall(policy_loss), "critic": LossCall(value_loss)}


def rows_of(samples: int, tokens: int, vocabulary: int) -> Rows:
    """Equal lengths: an eighth is prompt."""
    rng = np.random.default_rng(0)
    rows = []
    for uid in range(samples):
        ids = tuple(rng.integers(3, vocabulary, tokens).tolist())
        prompt, response = ids[: tokens // 8], ids[tokens // 8 :]
        rows.append(Sample(Prompt(uid, "", prompt), 0, response, (-1.0,) * len(response), "", FinishReason.LENGTH))
    return Rows(tuple(rows))


class FusedWorker:
    """Of two, each with one thread."""

    def __init__(self, context: WorkerContext, folder: str, dtype: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=context.store(), rank=context.rank, world_size=2)
        layouts = dict.fromkeys(layout for places in PLACES.values() for layout in places.values())
        self._teams = make_teams(layouts, context.rank, timeout_s=WAIT_S, waiting_for=context.waiting_for)
        self._folder, self._dtype = folder, dtype
        self._spans: list[Span] = []

    def close(self) -> None:
        dist.destroy_process_group()

    def seconds(
        self, arrangement: str, samples: int, tokens: int, micro_batches: int, steps: int, schedule: Schedule | None
    ) -> list[float]:
        """Of each optimizer step of both models, from all ready to all done.

        Args:
            arrangement: of PLACES.
            micro_batches: of a step, over all ranks.
            schedule: of both, for `together`.
        """
        places = PLACES[arrangement]
        rows = rows_of(samples, tokens, VOCABULARY)
        trainers = {
            role: self._trainer(role, team, len(rows), tokens, micro_batches // layout.parallelism.dp)
            for role, layout in places.items()
            if (team := self._teams[layout]) is not None
        }
        taken = []
        for step in range(steps):
            self._spans.clear()
            dist.barrier()
            began = time.perf_counter()
            if schedule is None:
                for role, trainer in trainers.items():
                    self._do(trainer.train([LossTerm(rows, LOSSES[role])], step=step), role)
            else:
                begun = [trainer.begin([LossTerm(rows, LOSSES[role])], step=step) for role, trainer in trainers.items()]
                order = fused_order(schedule, {role: _placement(role, places[role]) for role in ROLES})
                team = self._teams[order.layout]
                assert team is not None, "both workers are in it"
                self._do(train_together(begun, order, team))
            dist.barrier()
            taken.append(time.perf_counter() - began)
        return taken

    def spans(self) -> list[Span]:
        """What this worker did in the last step that `seconds` measured, by a clock that both share. What comes before
        the first action and behind the last is in none."""
        return self._spans

    def _do(self, work: Work[Any], role: str = "") -> None:
        """All of a work that waits for nobody; `role`: whose it is, where its actions do not say."""
        while True:
            began = time.perf_counter()
            try:
                done = next(work)
            except StopIteration:
                return
            assert done is not None, "its actions wait by themselves"
            end, name = time.perf_counter(), done.action.rpartition("/")[2]
            span = Span(name, done.kind, dist.get_rank(), began, end, lane=done.lane, role=done.role or role)
            self._spans.append(span)

    def _trainer(self, role: str, team: Team, samples: int, tokens: int, micro_batches: int) -> Trainer:
        model: Any = load_model(self._folder, dtype=self._dtype)
        model = model if role == "actor" else scalar_of(model, seed=1)
        return Trainer(
            part_of(model, team) if team.pp.size > 1 else model,
            ExecutionSettings(samples * tokens, micro_batches=micro_batches),
            SampleSettings(1.0, tokens),
            UpdateSettings(OptimizerSettings(learning_rate=1e-6), 1000),
            role=role,
            team=team,
        )


def _placement(role: str, layout: Layout) -> Placement:
    return Placement(f"{role}.train", "train", layout.mesh.ranks, pp=layout.parallelism.pp)
