"""Saving and loading as moves: what one layout saves, any other loads.

    actor.masters-00000.safetensors   what rank 0 writes; replicas share the writing, every element stands once
    actor.masters-00001.safetensors
    actor.masters.layout.json         which file has which part of which parameter

Each file is whole or absent. The caller has to make sure that no file is missing: a folder is complete once every rank
has returned, and is best renamed then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from plait.errors import DataError
from plait.file_writes import writing
from plait.layout.holdings import Holdings
from plait.layout.mesh import Cluster
from plait.layout.move import BUCKET_BYTES, plan_move
from plait.layout.stores import from_manifest, stored_once, to_manifest, writers
from plait.output import write_file
from plait.reallocation.communicator import Channel
from plait.reallocation.mover import moving
from plait.reallocation.stores import store_files, store_path
from plait.schedule.work import Work


@dataclass(frozen=True)
class SavedFiles:
    """Where holdings are saved."""

    folder: Path
    """Is there already."""
    name: str
    """What the files' names begin with; several holdings in one folder have different names."""

    @property
    def manifest(self) -> Path:
        """Says which file has which part of which parameter."""
        return self.folder / f"{self.name}.layout.json"


def saving(
    holdings: Holdings,
    cluster: Cluster,
    rank: int,
    buffers: Mapping[str, Tensor],
    saved: SavedFiles,
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> Work[None]:
    """Save what all ranks hold, an action per `next()`; every rank of `holdings` does its part, in no order.

    Args:
        holdings: such as `weights`, or `zero_shards` of masters or moments, under the layout that they have now.
        buffers: by name, flat [elements that this rank holds of it], in the dtype that `holdings` says.

    Raises:
        RunError: a file could not be written.
    """
    stores = stored_once(holdings, cluster)
    plan = plan_move(writers(holdings), stores, cluster, bucket_bytes=bucket_bytes)
    if rank == min(holdings.ranks):
        with writing(saved.manifest):
            write_file(saved.manifest, to_manifest(stores, cluster))
    files = store_files(stores, cluster, saved.folder, saved.name)
    yield from moving(plan, rank, buffers, files=files, name=f"{saved.name}.save")


def written(holdings: Holdings, rank: int, saved: SavedFiles) -> list[Path]:
    """The files that a rank has written in a save; empty if other ranks wrote all that it holds."""
    ranks = sorted(holdings.ranks)
    manifest = [saved.manifest] if rank == ranks[0] else []
    return manifest + [path for path in [store_path(saved.folder, saved.name, ranks.index(rank))] if path.is_file()]


def loading(
    target: Holdings,
    cluster: Cluster,
    rank: int,
    buffers: Mapping[str, Tensor],
    saved: SavedFiles,
    channel: Channel | None = None,
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> Work[None]:
    """Load under any layout, an action per `next()`. Each node reads what it needs once; its ranks spread it.

    Args:
        target: what the ranks need, in any dtype.
        buffers: by name, flat [elements that this rank needs of it], in the dtype of `target`; written in place.
        cluster: the devices there are now, not those that saved.

    Raises:
        DataError, LayoutError: a file is missing or damaged, or of another model.
        RunError: a peer is gone or late.
    """
    path = saved.manifest
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: expected the layout of saved tensors, found: {error}") from error
    source = from_manifest(text, target.params, cluster, str(path))
    plan = plan_move(source, target, cluster, bucket_bytes=bucket_bytes)
    files = store_files(source, cluster, saved.folder, saved.name)
    yield from moving(plan, rank, buffers, channel, files=files, name=f"{saved.name}.load")
