"""The optimizer's state of a role in a checkpoint: saved by parts under one plan, loaded under any other.

Each rank writes what it holds (`reallocation.saving`). In checkpoints of early versions, one process had each buffer
whole in the checkpoint's one tensor file. Both are layouts, and both are read under any plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from plait.checkpoint.digests import digesting
from plait.checkpoint.store import Checkpoint
from plait.errors import RESUME, DataError, LayoutError, RunError
from plait.layout.boxes import Holding
from plait.layout.holdings import Holdings, flat_holdings, weights
from plait.layout.mesh import Cluster, Layout, Parallelism
from plait.layout.move import plan_move
from plait.layout.params import Parameters
from plait.layout.shards import shard
from plait.models.files.finite import Broken, broken, describe, is_finite
from plait.models.files.tensor_file import FileDigest
from plait.models.working_weights import in_order_of_modules
from plait.reallocation.communicator import Channel
from plait.reallocation.mover import moving
from plait.reallocation.saving import SavedFiles, loading, saving, written
from plait.reallocation.stores import StoreFile
from plait.schedule.work import Work, to_the_end
from plait.workers.ranks import WAIT_S

if TYPE_CHECKING:
    from plait.training.trainer import Trainer

COUNTS = ("attempted_steps", "applied_steps", "skipped_in_row")


def saving_state(
    trainer: Trainer, cluster: Cluster, rank: int, folder: Path
) -> Work[tuple[dict[str, int], dict[str, FileDigest]]]:
    """Write what this rank holds; every rank of the trainer's layout does its part. Returns the counts, and by their
    names the digests of the files that it wrote, as they lie there."""
    state, digests = trainer.optimizer.state(), dict[str, FileDigest]()
    for name, holdings in trainer.optimizer.holdings().items():
        saved = SavedFiles(folder, f"{trainer.role}.{name}")
        yield from saving(holdings, cluster, rank, {name: state[name]}, saved)
        for path in written(holdings, rank, saved):
            digests[path.name] = yield from digesting(path)
    return {name: int(state[name]) for name in COUNTS}, digests


def broken_state(trainer: Trainer, rank: int) -> list[Broken]:
    """Which parameters' masters or moments are not finite, of what this rank has of a trained role."""
    pieces_of_all: list[Broken] = []
    buffers = trainer.optimizer.buffers()
    for name, holdings in trainer.optimizer.holdings().items():
        if not is_finite(buffers[name]):
            pieces = (
                (f"{trainer.role}.{name} of {holdings.params[holding.param].name}", _viewed(buffers[name], holding))
                for holding in holdings.ranks.get(rank, ())
            )
            pieces_of_all += broken(pieces)
    return pieces_of_all


def refuse_broken(pieces: list[Broken]) -> None:
    """Raises RunError where anything is: no run could go on from it."""
    if pieces:
        raise RunError(f"{describe(pieces)}, so it is not saved (a lower `optimizer.learning_rate` may help)")


def _viewed(buffer: torch.Tensor, holding: Holding) -> torch.Tensor:
    return buffer.as_strided(holding.box.shape, holding.strides, buffer.storage_offset() + holding.offset)


def loading_state(
    trainer: Trainer,
    parameters: Parameters,
    cluster: Cluster,
    rank: int,
    folder: Path,
    counts: Mapping[str, int] | None,
) -> Work[None]:
    """Continue from what any plan saved; every rank of the trainer's layout does its part. Working weights follow.

    Args:
        parameters: of what is trained of the whole model.
        counts: of the checkpoint's state; None: an early version saved it in one file.

    Raises:
        DataError, LayoutError: a file is missing or damaged, or of another model.
    """
    state, channel = dict(trainer.optimizer.state()), Channel(deadline_s=WAIT_S)
    for name, holdings in trainer.optimizer.holdings().items():
        with _saying_what_it_needs(trainer.role):
            buffers = {name: state[name]}
            if counts is not None:
                saved = SavedFiles(folder, f"{trainer.role}.{name}")
                yield from loading(holdings, cluster, rank, buffers, saved, channel)
                continue
            stored = Checkpoint(0, folder, {}).tensors_path
            source, files = _one_file(holdings, parameters, cluster, stored, f"{trainer.role}/{name}")
            plan = plan_move(source, holdings, cluster)
            name = f"{trainer.role}.{name}.load"
            yield from moving(plan, rank, buffers, channel, files=files, name=name)
    if counts is None:
        tensors = Checkpoint(0, folder, {}).tensors()
        counts = {name: int(tensors[f"{trainer.role}/{name}"]) for name in COUNTS}
    trainer.optimizer.load_state(state | {name: torch.tensor(counts[name], dtype=torch.int64) for name in COUNTS})


@contextmanager
def _saying_what_it_needs(role: str) -> Iterator[None]:
    """Raises DataError, LayoutError: one that passes through, with what a run needs to go on."""
    try:
        yield
    except (DataError, LayoutError) as error:
        raise type(error)(
            f"{error}; {RESUME} needs the model of {role} and the checkpoint as the run left them: put them back, or "
            "start over in another `run_dir`"
        ) from error


def read_masters(model: Any, role: str, folder: Path) -> None:
    """Bring the masters that several ranks saved into the working weights of a whole model on the CPU."""
    dtype = str(model.trained.weights.dtype).removeprefix("torch.")
    target = weights(model.trained.parameters, Layout.on((0,)), dtype, "weights")
    buffers = {"weights": model.trained.weights}
    to_the_end(loading(target, Cluster(1, 1), 0, buffers, SavedFiles(folder, f"{role}.masters")))


def _one_file(
    holdings: Holdings, parameters: Parameters, cluster: Cluster, path: Path, buffer: str
) -> tuple[Holdings, dict[int, StoreFile]]:
    """A whole flat buffer in a file, in the order of the model's modules, as holdings of one store."""
    flat = in_order_of_modules(shard(parameters, Parallelism(), 0, 0))
    index = {param.name: number for number, param in enumerate(holdings.params)}
    store = cluster.store(0)
    lengths = {buffer: flat.num_elements}
    source = Holdings(holdings.params, holdings.dtype, {store: flat_holdings(flat, index, buffer)}, {store: lengths})
    return source, {store: StoreFile(path, lengths)}
