"""A run on several processes, as the process that the user started sees it: launches them, shows their progress, ends
them, and turns whatever ends one into an error. No rows pass through here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from plait.checkpoint.store import CheckpointStore
from plait.errors import RESUME, RunError, UserError
from plait.launch.failures import Ended, NodeLost, WorkerError, as_said
from plait.launch.local import LocalNode, LocalProcesses
from plait.launch.nodes.gathered import Gathered
from plait.observe.loading import loading
from plait.observe.progress import Progress
from plait.runtime.controller import Outcome
from plait.runtime.folder.directory import RunDirectory
from plait.runtime.folder.ending import end_noted
from plait.runtime.folder.history import Origin
from plait.runtime.folder.progressed import has_checkpoint
from plait.runtime.folder.run_files import RunFiles
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.processes.forwarded_signals import ForwardedSignals, forwarding_signals
from plait.runtime.processes.launching import RUN_S, launcher_shown
from plait.runtime.processes.nodes import threads_of
from plait.runtime.processes.restarting import RanksLost
from plait.runtime.processes.worker import Job, Worker
from plait.runtime.processes.worker_output import STATUS, worker_output
from plait.runtime.step_metrics import watched
from plait.schedule.plan import Plan
from plait.workers.ranks import LEADER
from plait.workers.status_file import read_status


def supervise(
    prepared: Prepared,
    directory: RunDirectory,
    *,
    resume: bool,
    origin: Origin | None = None,
    nodes: Gathered | None = None,
) -> Outcome:
    """Run a plan of several ranks to its end.

    Args:
        directory: claimed; the leader writes it.
        origin: for the run's history.
        nodes: machines on which the ranks are to be; None: this one.

    Raises:
        UserError: something in the recipe cannot be used.
        RanksLost: a rank died, froze or stalled, or its node was lost; the run can be taken up.
        RunError: the run had to stop; says which rank, in what, who waited for whom, and where it can be taken up.
        KeyboardInterrupt: a signal before the first step, or a second one.
    """
    recipe, plan = prepared.recipe, prepared.plan
    num_ranks = plan.num_ranks
    path = directory.path if nodes is None else directory.path.resolve()
    places = [LocalNode()] if nodes is None else nodes.nodes
    threads = threads_of(recipe, num_ranks, places)
    loading(f"{num_ranks} process{'es' * (num_ranks > 1)}, each with its part of {recipe.model}")
    loads = resume and has_checkpoint(directory.files.checkpoints)
    job = Job(recipe, plan, prepared.models, path, resume, loads, threads, origin or Origin.here())
    folder = RunFiles(path).workers
    status = folder / STATUS
    with worker_output(directory, resume=resume):
        progress = Progress(recipe.steps, watched=tuple(watched(prepared.flow, prepared.models, prepared.held_out)))
        with launcher_shown(prepared, threads, status, places, progress, output_dir=folder) as launcher:
            if note := spread(plan):
                progress.message(note)
            with end_noted(directory), saying_what_is_left(progress, job, directory):
                return _run(launcher, job, directory, nodes, status)


@contextlib.contextmanager
def saying_what_is_left(progress: Progress, job: Job, directory: RunDirectory) -> Iterator[None]:
    """A run that is left at once says where one can go on, also where its leader could not: it was ended for it, or did
    not answer. Raises KeyboardInterrupt, with what was said where there is a run to go on with."""
    try:
        yield
    except KeyboardInterrupt as left:
        directory.note_begun()
        if left.args or not directory.begun:
            raise
        said = f"left at once; {how_to_resume(job, directory)}"
        progress.message(said)
        raise KeyboardInterrupt(said) from None


def spread(plan: Plan) -> str:
    """What a person should know where tensor parallelism goes over the network; else nothing."""
    node_of = plan.cluster.node_of
    calls = [
        f"{p.call} ({p.mode}, tp {p.tp})"
        for p in plan.placements
        if any(len(set(map(node_of, p.ranks[at : at + p.tp]))) > 1 for at in range(0, len(p.ranks), p.tp))
    ]
    if not calls:
        return ""
    return (
        f"tensor parallelism of {', '.join(calls)} spans nodes: two sums of each layer go over the network in each "
        "forward; keep the ranks of a tp group on one node"
    )


def _run(launcher: LocalProcesses, job: Job, directory: RunDirectory, nodes: Gathered | None, status: Path) -> Outcome:
    signals: ForwardedSignals | None = None
    num_ranks = job.plan.num_ranks
    try:
        with (
            launcher.start(Worker, num_ranks, arguments=(job,)) as group,
            forwarding_signals(group) as signals,
            nullcontext() if nodes is None else nodes.wishes_to(signals.wished),
        ):
            leader = group.submit(LEADER, "run")
            if num_ranks > 1:
                group.submit(range(1, num_ranks), "run")
            outcome = leader.result(RUN_S)
            assert outcome is not None, "the leader returns the outcome"
        return replace(outcome, asked_to_stop=outcome.asked_to_stop or signals.asked)  # also as the ranks ended
    except WorkerError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise KeyboardInterrupt(*error.__cause__.args) from None
        if signals is not None and signals.ended_it(error.failure):
            raise KeyboardInterrupt from None
        raise explained(error, job, directory, status) from error
    except NodeLost as error:
        raise RanksLost(str(error), how_to_resume(job, directory)) from error


def explained(error: WorkerError, job: Job, directory: RunDirectory, status: Path) -> Exception:
    """What the user is told: an error of the input or of the run itself as one process would say it."""
    cause, failure = error.__cause__, error.failure
    if isinstance(cause, UserError) or (isinstance(cause, RunError) and failure.rank == LEADER):
        return cause
    if isinstance(cause, RunError) and cause.frames:  # raised by the user's code: where the ranks were says no more
        of_users = RunError(f"{cause} (on rank {failure.rank}); {how_to_resume(job, directory)}")
        of_users.frames = cause.frames
        return of_users
    if failure.ended in (Ended.RAISED, Ended.LATE):  # of the dead and the frozen it was read at once
        actions = read_status(status)
        peers = tuple(as_said(actions, peer) for peer in failure.peers)
        failure = replace(as_said(actions, failure), peers=peers)
    if failure.ended in (Ended.DIED, Ended.FROZEN, Ended.STALLED):
        return RanksLost(str(failure), how_to_resume(job, directory), failure)
    return RunError(f"{failure}\n{how_to_resume(job, directory)}")


def how_to_resume(job: Job, directory: RunDirectory) -> str:
    """What is kept of a run whose ranks are lost, and the command that goes on from it."""
    directory.note_begun()
    if not directory.begun:  # checkpoints are those of the run that it was to replace
        return "no step is saved; begin the run again"
    store = CheckpointStore(RunFiles(job.run_dir).checkpoints, keep_last=job.recipe.checkpoint.keep_last)
    with contextlib.suppress(RunError):
        if (checkpoint := store.latest()) is not None:
            where = f"the checkpoint of step {checkpoint.step} is good ({checkpoint.folder})"
            return f"{where}; go on from it with {RESUME}"
        return f"no step is saved; {RESUME} begins again at step 1, also by other keys"
    return f"no checkpoint in {store.folder} is whole"
