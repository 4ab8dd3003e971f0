"""How the ranks of a recipe are started, and what a person should know meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from plait.errors import RunError, UserError
from plait.launch.failures import WorkerError
from plait.launch.local import LocalProcesses
from plait.launch.node import Node
from plait.launch.watch import Watch
from plait.observe.progress import Progress
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.processes.progress_relay import ProgressRelay
from plait.workers.ranks import LEADER
from plait.workers.status_file import LINE_BYTES, StatusFile, read_progress, read_status

RUN_S = 365 * 24 * 3600.0
LOADS = "load models"
"""What the status of a rank says meanwhile."""


@contextlib.contextmanager
def launcher_shown(
    prepared: Prepared,
    threads: int,
    status: Path,
    nodes: Sequence[Node],
    progress: Progress,
    *,
    output_dir: Path | None = None,
) -> Iterator[LocalProcesses]:
    """What starts the ranks of a plan. While inside, what their leader tells is shown, and what a person should know of
    them said.

    Args:
        threads: of each rank.
        status: file in which they say what they are doing; it is made here.
        output_dir: where they leave what they print; None keeps only what errors quote.
    """
    recipe, num_ranks = prepared.recipe, prepared.plan.num_ranks
    StatusFile.create(status, num_ranks)
    with progress, ProgressRelay(progress, lambda: still_loading(read_status(status))) as relay:
        if recipe.device == "cpu" and len(nodes) == 1 and (note := crowding(num_ranks, threads, nodes[0].cores)):
            progress.message(note)
        watch = Watch(
            freeze_after_s=recipe.freeze_after_s,
            doing=lambda: read_status(status),
            progress=lambda: read_progress(status),
            stalled_after_s=recipe.stalled_after_s,
            on_devices=recipe.device != "cpu",
            heard=relay.hear,
        )
        lines = (status, LINE_BYTES)
        yield LocalProcesses(threads=threads, output_dir=output_dir, status=lines, nodes=nodes, watch=watch)


def as_alone(error: WorkerError, *, peers: bool = True) -> Exception:
    """What the user is told: an error of the input, or of a rank that leads, as one process would say it.

    Args:
        peers: whether the ranks work together; else each leads itself.
    """
    cause = error.__cause__
    if isinstance(cause, UserError) or (isinstance(cause, RunError) and (error.failure.rank == LEADER or not peers)):
        return cause
    return RunError(str(error.failure if peers else replace(error.failure, peers=())))


def crowding(num_ranks: int, threads: int, cores: int) -> str:
    """What a person should know where the processes have more threads than there are cores; else nothing."""
    if num_ranks * threads <= cores:
        return ""
    return (
        f"{num_ranks} processes with {threads} thread{'s' * (threads > 1)} each share {cores} cores: they slow each "
        "other down; fewer `devices` or `threads` may be faster"
    )


def still_loading(actions: Sequence[str]) -> str:
    """What a person should know where the leader has its models and waits for ranks that load theirs; else nothing.

    Args:
        actions: what each rank is doing.
    """
    loading = [rank for rank, action in enumerate(actions) if action == LOADS]
    if not loading or LEADER in loading:
        return ""
    shown = ", ".join(map(str, loading[:8])) + (f" and {len(loading) - 8} more" if len(loading) > 8 else "")
    is_one = len(loading) == 1
    return f"rank{'' if is_one else 's'} {shown} still load{'s' if is_one else ''} models; what needs them waits"
