"""An evaluation on several devices, as the process that the user started sees it: figures, and no rows. It has no
folder: what its ranks print goes when they have ended."""

from __future__ import annotations

from plait.launch.failures import WorkerError
from plait.launch.local import LocalNode
from plait.observe.loading import loading
from plait.observe.progress import Progress
from plait.runtime.evaluating.evaluations import Evaluations
from plait.runtime.folder.history import Origin
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.processes.launching import RUN_S, as_alone, launcher_shown
from plait.runtime.processes.nodes import threads_of
from plait.runtime.processes.worker import Job, Worker
from plait.runtime.processes.worker_output import STATUS
from plait.temporary_folder import TemporaryFolder
from plait.workers.ranks import LEADER


def measured_by_ranks(prepared: Prepared) -> Evaluations:
    """What `measured` gives, in short (`Evaluations.in_short`), by a process for each device of this machine.

    Args:
        prepared: as of `of_asked`.

    Raises:
        UserError: something in the recipe cannot be used.
        RunError: a rank could not go on; says which, and in what.
    """
    recipe, num_ranks, node = prepared.recipe, prepared.plan.num_ranks, LocalNode()
    threads = threads_of(recipe, num_ranks, [node])
    loading(f"{num_ranks} processes, each with its part of {recipe.model}")
    with TemporaryFolder("eval") as held:
        folder = held.path
        job = Job(recipe, prepared.plan, prepared.models, folder, False, False, threads, Origin.here())
        with launcher_shown(prepared, threads, folder / STATUS, [node], Progress(0)) as launcher:
            try:
                with launcher.start(Worker, num_ranks, arguments=(job,)) as group:
                    leader = group.submit(LEADER, "measure")
                    group.submit(range(1, num_ranks), "run")
                    return leader.result(RUN_S)
            except WorkerError as error:
                raise as_alone(error) from error
