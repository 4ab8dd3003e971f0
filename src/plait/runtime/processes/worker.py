"""One process of a run on several: rank 0 leads, the others serve it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from plait.compiled import ANNOUNCEMENT
from plait.launch.worker_context import WorkerContext
from plait.models.devices import backend
from plait.models.parallel import nccl
from plait.recipes.algorithm import traced_flow
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel
from plait.runtime.controller import Outcome, train
from plait.runtime.evaluating.evaluations import Evaluations
from plait.runtime.folder.directory import RunDirectory
from plait.runtime.folder.history import Origin
from plait.runtime.inputs.prepared import Kept
from plait.runtime.prediction.network import Machines
from plait.runtime.prediction.refinement import conclude
from plait.runtime.prepare import prepare
from plait.runtime.process import set_up
from plait.runtime.processes.launching import LOADS
from plait.runtime.processes.measured import for_measuring, measured, of_asked
from plait.runtime.processes.progress_relay import RelayedProgress
from plait.runtime.session import Session
from plait.runtime.stopping import LEADERS_SIGNAL
from plait.runtime.workers import Workers
from plait.schedule.plan import Plan
from plait.workers.announcer import Announcer
from plait.workers.follower import FollowerLoop
from plait.workers.rank_state import RankState, Setting
from plait.workers.ranks import LEADER, WAIT_S
from plait.workers.recorder import Recorder
from plait.workers.role_builder import make_rank_state
from plait.workers.status_file import StatusFile
from plait.workers.transport import Transport
from plait.workers.worker_group import WorkerGroup


@dataclass(frozen=True)
class Job:
    """What every rank is given: small, and the same for all."""

    recipe: Recipe
    plan: Plan
    models: Sequence[RoleModel]
    run_dir: Path
    resume: bool
    loads: bool
    """See `Setting`."""
    threads: int
    """Compute threads of each process."""
    origin: Origin


class Worker:
    """See `launch`. Joins the process group when it is made; `run` does all the rest, or on the leader of an evaluation
    `measure`."""

    def __init__(self, context: WorkerContext, job: Job) -> None:
        self.rank = context.rank
        self._context = context
        self._job = job
        self._status = StatusFile(context.place.status, context.rank)
        set_up(job.threads)
        dist.init_process_group(
            backend(job.recipe.device, context.place.device),
            store=context.store(),
            rank=context.rank,
            world_size=context.num_ranks,
            timeout=timedelta(seconds=WAIT_S),
        )
        nccl.connect(None, range(context.num_ranks), self.rank, pairs=False)
        if self.rank == LEADER:  # whom the others wait for, as they compile the same
            ANNOUNCEMENT.tell = self.progress().message
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_S))
        assert not isinstance(group, int | None), "every rank is in the group of all"
        peers = [rank for rank in range(context.num_ranks) if rank != LEADER] if self.rank == LEADER else [LEADER]
        self._transport = Transport(group, self.rank, peers, waiting_for=context.waiting_for)

    def run(self) -> Outcome | None:
        """The whole run; its outcome on rank 0."""
        job = self._job
        self._status.tick()
        if self.rank == LEADER:
            with self._status.doing("prepare"):
                kept, machines = Kept(job.plan, job.plan), Machines(job.plan.nodes)
                prepared = prepare(job.recipe.letting_be(), kept=kept, machines=machines)
            assert prepared.plan == job.plan, "the leader completes the plan otherwise than who started it"
            directory = RunDirectory.lent(job.run_dir)
            with Session(prepared, directory, resume=job.resume, leading=self, origin=job.origin) as session:
                outcome = train(session, (LEADERS_SIGNAL,))
                session.workers.close()
            conclude(prepared, directory.path)
            return outcome
        with self._status.doing(LOADS):
            rank_state = self._parts()
        FollowerLoop(rank_state, self._transport, self._status).serve()
        return None

    def measure(self) -> Evaluations:
        """What the leader does in place of `run` where nothing is trained. Figures alone: rows stay here."""
        self._status.tick()
        with self._status.doing("prepare"):
            kept = Kept(self._job.plan, self._job.plan)
            prepared = prepare(for_measuring(self._job.recipe), trains=False, kept=kept)
        return measured(of_asked(prepared), self, self.progress()).in_short()

    def progress(self) -> RelayedProgress:
        """Shown by the process that started the run."""
        return RelayedProgress(self._context.tell)

    def workers(self, recorder: Recorder, *, loads: bool = False) -> Workers:
        """Join the other ranks, as their leader."""
        assert loads == self._job.loads, "the leader finds another checkpoint than who started it"
        with self._status.doing(LOADS):
            announcer = Announcer(self._parts(), self._transport, recorder, self._status)
            return WorkerGroup(announcer, self._context.num_ranks)

    def _parts(self) -> RankState:
        job = self._job
        flow = traced_flow(job.recipe.letting_be(("options",)))
        context = self._context
        return make_rank_state(
            Setting(
                job.recipe,
                flow,
                job.models,
                job.plan,
                self.rank,
                context.waiting_for,
                context.place.ahead_s,
                loads=job.loads,
            )
        )
