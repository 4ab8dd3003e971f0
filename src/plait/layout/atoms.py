"""What has to move: the elements that ranks lack, grouped by who holds them and who needs them.

Every parameter is cut where any of its holdings, old or new, begins or ends. No piece (*atom*) is then held or needed
in part. Atoms with equal holders and needers form one class, so that a model of hundreds of tensors becomes a few dozen
classes, whatever the two parallelisms are: nothing here needs sizes to divide one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from plait.errors import LayoutError
from plait.layout.boxes import Box
from plait.layout.holdings import Holdings
from plait.layout.params import Param

TensorBox = tuple[int, Box]
"""(parameter number, box)"""


@dataclass(frozen=True)
class MoveClass:
    """Elements that the same ranks hold and the same ranks lack."""

    holders: tuple[int, ...]
    needers: tuple[int, ...]
    pieces: list[TensorBox] = field(default_factory=list)

    @property
    def num_elements(self) -> int:
        return sum(box.num_elements for _, box in self.pieces)


@dataclass(frozen=True)
class Demand:
    """classes: what has to travel; kept: rank → what it needs and already holds."""

    classes: tuple[MoveClass, ...]
    kept: dict[int, list[TensorBox]]


def demand(source: Holdings, target: Holdings) -> Demand:
    """Compare two holdings of the same parameters.

    Raises:
        LayoutError: a rank needs elements that nobody holds; names the parameter.
    """
    assert source.params == target.params, "source and target count their parameters differently"
    classes: dict[tuple[tuple[int, ...], tuple[int, ...]], MoveClass] = {}
    kept: dict[int, list[TensorBox]] = {}
    atoms: dict[object, list[_Atom]] = {}
    for number, (held, needed) in enumerate(zip(source.by_param, target.by_param, strict=True)):
        if not needed:
            continue
        if (held, needed) not in atoms:
            atoms[held, needed] = _atoms(source.params[number], held, needed)
        for box, holders, needers, keepers in atoms[held, needed]:
            for rank in keepers:
                kept.setdefault(rank, []).append((number, box))
            if needers:
                key = (holders, needers)
                if key not in classes:
                    classes[key] = MoveClass(holders, needers)
                classes[key].pieces.append((number, box))
    return Demand(tuple(classes.values()), kept)


_Atom = tuple[Box, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""(box, ranks that hold it, ranks that lack it, ranks that hold and need it)"""


def _atoms(param: Param, held: Sequence[tuple[int, Box]], needed: Sequence[tuple[int, Box]]) -> list[_Atom]:
    atoms = []
    boxes = [(box, tag) for tag, (_, box) in enumerate((*held, *needed))]
    if all(box == boxes[0][0] for box, _ in boxes):
        cells = [(boxes[0][0], range(len(boxes)))]
    else:
        cells = _cells(boxes, 0)
    for ranges, tags in cells:
        holders = tuple(sorted({held[tag][0] for tag in tags if tag < len(held)}))
        wanted = sorted({needed[tag - len(held)][0] for tag in tags if tag >= len(held)})
        if not wanted:
            continue
        if not holders:
            raise LayoutError(
                f"source: expected every element of {param.name} that rank {wanted[0]} needs to be held somewhere, "
                f"found nobody with {Box(*ranges)}"
            )
        owners = set(holders)
        needers = tuple(rank for rank in wanted if rank not in owners)
        atoms.append((Box(*ranges), holders, needers, tuple(rank for rank in wanted if rank in owners)))
    return atoms


_Cell = tuple[tuple[int, ...], tuple[int, ...]]
"""(bounds of the dims from the current one on, tags of the boxes that hold it)"""


def _cells(boxes: Sequence[tuple[Box, int]], dim: int) -> list[_Cell]:
    """Cut the union of boxes into cells that lie wholly inside or outside of each; neighbours of equal kind are one.

    Dim by dim, and in each slab only the boxes that reach into it: the number of cells stays near that of boxes.
    """
    if dim == 3:
        return [((), tuple(tag for _, tag in boxes))]
    low, high = 2 * dim, 2 * dim + 1
    cuts = sorted({box[low] for box, _ in boxes} | {box[high] for box, _ in boxes})
    slabs: list[tuple[int, int, list[_Cell]]] = []
    for start, stop in pairwise(cuts):
        inside = [(box, tag) for box, tag in boxes if box[low] <= start and stop <= box[high]]
        if not inside:
            continue
        cells = _cells(inside, dim + 1)
        if slabs and slabs[-1][1] == start and slabs[-1][2] == cells:
            slabs[-1] = (slabs[-1][0], stop, cells)
        else:
            slabs.append((start, stop, cells))
    return [((start, stop, *bounds), tags) for start, stop, cells in slabs for bounds, tags in cells]
