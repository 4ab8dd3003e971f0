"""Files as a layout: what is saved under one plan is loaded under any other.

A checkpoint is a set of stores (`mesh.Cluster.store`), each with some boxes of some parameters, every element in one of
them. Saving is a move from ranks to stores, loading a move back; the manifest is the stores' holdings as JSON.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from plait.errors import DataError, LayoutError
from plait.file_form import FileForm
from plait.layout.atoms import TensorBox, demand
from plait.layout.boxes import Box, Holding, boxes_of_range, dense_strides
from plait.layout.holdings import Holdings, packed
from plait.layout.mesh import Cluster
from plait.layout.params import Param

FORM = FileForm("layout")


def divided(holdings: Holdings) -> dict[int, list[TensorBox]]:
    """Every element that anyone holds, given to one of its holders; equal loads as far as that can be.

    What a rank counts of a norm over all ranks, or writes of a checkpoint.
    """
    pieces: dict[int, list[TensorBox]] = {rank: [] for rank in sorted(holdings.ranks)}
    loads = dict.fromkeys(pieces, 0)
    holders: dict[TensorBox, list[int]] = defaultdict(list)
    for rank, mine in sorted(demand(holdings, holdings).kept.items()):
        for piece in mine:
            holders[piece].append(rank)
    for piece, ranks in sorted(holders.items(), key=lambda item: (len(item[1]), item[0])):
        rank = min(ranks, key=lambda rank: (loads[rank], rank))
        loads[rank] += piece[1].num_elements
        pieces[rank].append(piece)
    return {rank: sorted(mine) for rank, mine in pieces.items()}


def stored_once(holdings: Holdings, cluster: Cluster) -> Holdings:
    """One store for each rank, in the order of ranks, with what `divided` gives the rank. A save is the move from
    `writers(held)` to it."""
    boxes = {cluster.store(index): mine for index, mine in enumerate(divided(holdings).values())}
    return packed(holdings.params, holdings.dtype, boxes, "file")


def writers(holdings: Holdings) -> Holdings:
    """The same holdings with every element on one rank only: the one whose store `stored_once` gives it to.

    The source of a save: from it each rank writes its own store and no other.
    """
    ranks = {}
    for rank, pieces in divided(holdings).items():
        written = []
        for number, box in pieces:
            whole = holdings.find(rank, number, box)[0]
            written.append(whole._replace(box=box, offset=whole.first(box)))
        ranks[rank] = tuple(written)
    return Holdings(holdings.params, holdings.dtype, ranks, holdings.buffers)


def to_manifest(holdings: Holdings, cluster: Cluster) -> str:
    """The holdings of stores as JSON, parameters by name."""
    params = {param.name: _said(param) for param in holdings.params}
    stores = [
        {
            "buffers": dict(holdings.buffers[rank]),
            "holdings": [
                [holdings.params[h.param].name, list(h.box), h.buffer, h.offset, list(h.strides)] for h in mine
            ],
        }
        for rank, mine in sorted(holdings.ranks.items())
    ]
    assert all(cluster.is_store(rank) for rank in holdings.ranks), "a manifest describes stores"
    record = {
        "format": FORM.format,
        "version": FORM.version,
        "dtype": holdings.dtype,
        "params": params,
        "stores": stores,
    }
    return json.dumps(record)


def from_manifest(text: str, params: tuple[Param, ...], cluster: Cluster, name: str = "manifest") -> Holdings:
    """The holdings that a manifest describes, as a source for these parameters on this cluster.

    Raises:
        DataError: the text is no manifest.
        LayoutError: a parameter is missing, or has another shape.
    """
    record = FORM.parse(text, name)
    try:
        return _read(record, params, cluster, name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, LayoutError):
            raise
        raise DataError(f"{name}: expected the holdings of stores, found {error!r}") from error


def _said(param: Param) -> list[Any]:
    """What boxes of a parameter depend on."""
    return [list(param.shape), param.cut, param.sections]


def _read(record: Mapping[str, Any], params: tuple[Param, ...], cluster: Cluster, name: str) -> Holdings:
    before: dict[str, Param] = {}
    for param in params:
        shape, cut, sections = record["params"].get(param.name) or ("none", None, 1)
        if shape != list(param.shape):
            raise LayoutError(
                f"{name}: expected {param.name} with shape {list(param.shape)}, found {shape}: it was saved from "
                "another model"
            )
        before[param.name] = Param(param.name, param.shape, cut=cut, sections=sections)
    index = {param.name: number for number, param in enumerate(params)}

    def held(stored: Sequence[Any]) -> Iterator[Holding]:
        param, box, buffer, offset, strides = stored
        if param in index:
            holding = Holding(index[param], Box(*box), buffer, offset, tuple(strides))
            yield from _cut_anew(holding, before[param], params[index[param]])

    ranks: dict[int, tuple[Holding, ...]] = {}
    buffers: dict[int, dict[str, int]] = {}
    for number, store in enumerate(record["stores"]):
        ranks[cluster.store(number)] = tuple(chain.from_iterable(map(held, store["holdings"])))
        buffers[cluster.store(number)] = {key: int(size) for key, size in store["buffers"].items()}
    return Holdings(params, record["dtype"], ranks, buffers)


def _cut_anew(holding: Holding, before: Param, now: Param) -> Iterator[Holding]:
    """A box of a parameter, stored by itself, as boxes of it as it is cut now; itself where that is as it was."""
    if _said(before) == _said(now):
        yield holding
        return
    assert holding.strides == dense_strides(holding.box), f"{now.name}: a file has its boxes by themselves"
    whole, other = (Box(0, outer, 0, length, 0, inner) for outer, length, inner in (before.grid, now.grid))
    offset = holding.offset
    for low, high in Holding(holding.param, whole, "", 0, dense_strides(whole)).at(holding.box).ranges():
        for box in boxes_of_range(other, low, high):
            yield Holding(holding.param, box, holding.buffer, offset, dense_strides(box))
            offset += box.num_elements
