"""Logical parameters, their blocks, and the flat buffer of one rank.

Weights, masters and optimizer moments are the same parameters under layouts; a layout is data, so that moving
parameters, checkpointing and export are all "copy block from layout A to layout B".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

ALIGNMENT_BYTES = 64
"""Every block starts on a multiple of this in every dtype. Vector kernels treat a misaligned head or tail apart, so
two buffers with other offsets could differ in the last bit."""

ALIGNMENT_ELEMENTS = ALIGNMENT_BYTES // 2
"""64 bytes of the narrowest working dtype (2 bytes). Offsets count elements, so bfloat16 weights and the float32
masters of one layout stand at equal offsets and are copied as whole buffers."""


@dataclass(frozen=True)
class Param:
    """One logical tensor of a model; tied names are one Param."""

    name: str
    shape: tuple[int, ...]
    layer: int | None = None
    """Decoder layer that owns it; None: embedding, final norm, head."""
    cut: int | None = None
    """Dim that tensor parallelism cuts; None: replicated."""
    sections: int = 1
    """Equal parts of the cut dim that are cut each for itself (2: a fused gate-up projection)."""

    def __post_init__(self) -> None:
        assert self.cut is None or 0 <= self.cut < len(self.shape), f"{self.name}: no dim {self.cut} in {self.shape}"
        assert self.sections == 1 or (self.cut is not None and self.shape[self.cut] % self.sections == 0), (
            f"{self.name}: {self.shape} does not divide into {self.sections} sections along dim {self.cut}"
        )

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Block:
    """The half-open range [start, stop) of a parameter along its cut dim, in elements of that dim.

    A parameter without a cut dim has one block, (0, 1): all of it.
    """

    param: Param
    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.stop <= self.extent(self.param), f"{self.param.name}: no range {self!r}"

    @staticmethod
    def extent(param: Param) -> int:
        return 1 if param.cut is None else param.shape[param.cut]

    @classmethod
    def whole(cls, param: Param) -> Block:
        return cls(param, 0, cls.extent(param))

    @property
    def shape(self) -> tuple[int, ...]:
        shape, cut = self.param.shape, self.param.cut
        return shape if cut is None else (*shape[:cut], self.stop - self.start, *shape[cut + 1 :])

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class FlatLayout:
    """Blocks in order, each contiguous in row-major order, in one flat buffer (block-major).

    `aliases` maps every further name of a tied parameter to the name it is stored under.
    """

    blocks: tuple[Block, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(set(self.blocks)) == len(self.blocks), "a block stands twice in the layout"
        names = {block.param.name for block in self.blocks}
        assert not names & set(self.aliases), "a name is both stored and an alias"
        assert set(self.aliases.values()) <= names, "an alias points at a parameter that is not in the layout"

    @classmethod
    def one_rank(cls, params: Iterable[Param], aliases: Mapping[str, str] | None = None) -> FlatLayout:
        """The layout of a rank that holds every parameter whole."""
        return cls(tuple(Block.whole(param) for param in params), dict(aliases or {}))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each block; multiples of ALIGNMENT_ELEMENTS."""
        offsets, end = [], 0
        for block in self.blocks:
            offsets.append(end)
            end += -(-block.num_elements // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
        return tuple(offsets)

    @cached_property
    def num_elements(self) -> int:
        """Length of the flat buffer, the alignment gaps included (they hold zeros)."""
        if not self.blocks:
            return 0
        return self.offsets[-1] + -(-self.blocks[-1].num_elements // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS

    @cached_property
    def entries(self) -> tuple[tuple[Block, int, int], ...]:
        """(block, start, stop) of every block, in buffer order."""
        return tuple(
            (block, start, start + block.num_elements) for block, start in zip(self.blocks, self.offsets, strict=True)
        )
