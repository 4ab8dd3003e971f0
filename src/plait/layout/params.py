"""Logical parameters, their blocks, and the flat buffer of one rank.

Weights, masters and optimizer moments are the same parameters under layouts; a layout is data, so that moving
parameters, checkpointing and export are all "copy block from layout A to layout B".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Literal

ALIGNMENT_BYTES = 64
"""Every block starts on a multiple of this in every dtype. Vector kernels treat a misaligned head or tail apart, so
two buffers with other offsets could differ in the last bit."""

ALIGNMENT_ELEMENTS = ALIGNMENT_BYTES // 2
"""64 bytes of the narrowest working dtype (2 bytes). Offsets count elements, so bfloat16 weights and the float32
masters of one layout stand at equal offsets and are copied as whole buffers."""

Ends = Literal["first", "last", "both"]

_GROUP_PROJECTIONS = frozenset({"k_proj", "v_proj"})
_HEAD_PROJECTIONS = frozenset({"q_proj", "q_b_proj", "kv_b_proj", "query_key_value", "o_proj", "sinks"})
"""query_key_value: as GPT-NeoX has it, the query, key and value of a head side by side."""
_ATTENTIONS = frozenset({"self_attn", "attention", "attn"})
_OUTPUTS = frozenset({"dense", "out_proj"})
"""Output projections of an attention; elsewhere the names mean other things."""


@dataclass(frozen=True)
class Heads:
    """How the sharded dim of a parameter of the attention is made of heads; ranks cut between heads only.

    All query heads of one group read the same key-value head. A rank has whole groups, or heads of a single group, so
    that every rank has the same number of query heads per key-value head in each of its groups.
    """

    heads: int
    """Query heads of the model."""
    groups: int
    """Key-value heads of the model; divides `heads`."""
    shared: bool = False
    """The parameter has one part per group (keys, values), not per head: ranks that share a group hold equal parts."""

    def __post_init__(self) -> None:
        assert 0 < self.groups <= self.heads, f"expected 1 to {self.heads} groups of heads, found {self.groups}"
        assert self.heads % self.groups == 0, f"{self.heads} heads do not divide into {self.groups} equal groups"

    @property
    def parts(self) -> int:
        """Parts of the sharded dim that are never split."""
        return self.groups if self.shared else self.heads

    def part_range(self, index: int, ways: int) -> tuple[int, int]:
        """Parts [first, stop) of rank `index` of `ways`; `ways` is at most `heads`."""
        per_group = 1 if self.shared else self.heads // self.groups
        if ways <= self.groups:
            return index * self.groups // ways * per_group, (index + 1) * self.groups // ways * per_group
        group = ((index + 1) * self.groups - 1) // ways
        first = group * ways // self.groups
        if self.shared:
            return group, group + 1
        members = (group + 1) * ways // self.groups - first
        place, start = index - first, group * per_group
        return start + place * per_group // members, start + (place + 1) * per_group // members


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
    """Equal parts of the sharded dim that are cut each for itself (2: a fused gate-up projection)."""
    heads: Heads | None = None
    """The heads that the sharded dim is made of; None: it can be cut anywhere."""
    widths: tuple[int, ...] = ()
    """The cut dim is made of parts of unequal sections, as queries, keys and values of a linear attention side by side
    are: so many elements of each section belong to a unit (a key head), and ranks have whole units, in all sections the
    same. Then `sections` is 1 and `heads` None. Empty: there are no units."""
    ends: Ends = "first"
    """The pipeline stages that hold a parameter without a layer; "both" for a tied embedding."""

    def __post_init__(self) -> None:
        assert self.cut is None or 0 <= self.cut < len(self.shape), f"{self.name}: no dim {self.cut} in {self.shape}"
        assert self.sections == 1 or (self.cut is not None and self.shape[self.cut] % self.sections == 0), (
            f"{self.name}: {self.shape} does not divide into {self.sections} sections along dim {self.cut}"
        )
        assert self.heads is None or (self.cut is not None and self.extent % self.heads.parts == 0), (
            f"{self.name}: {self.shape} does not divide into {self.heads} along dim {self.cut}"
        )
        if self.widths:
            assert self.cut is not None, f"{self.name}: units of no dim"
            assert (self.sections, self.heads) == (1, None), f"{self.name}: it is cut by units alone"
            assert self.shape[self.cut] % sum(self.widths) == 0, f"{self.name}: {self.shape} has no whole units"
            assert len(self.widths) == 1 or prod(self.shape[: self.cut]) == 1, f"{self.name}: sections lie in rows"

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def extent(self) -> int:
        """Length of each section of the sharded dim, or its units where it has some; 1 for a parameter without one."""
        return 1 if self.cut is None else self.shape[self.cut] // (sum(self.widths) or self.sections)

    @property
    def grid(self) -> tuple[int, int, int]:
        """The parameter as a row-major array of three dims whose middle one is what tensor parallelism cuts.

        (everything outside the sharded dim times the sections, its length in each, everything inside it). A block is a
        range of the middle dim, and its storage is this array narrowed to the range: equal sections need no case of
        their own. Where they have `widths`, a block is a range in each of them, one behind another (`Block.ranges`).
        """
        if self.cut is None:
            return 1, 1, self.num_elements
        outer, inner = prod(self.shape[: self.cut]), prod(self.shape[self.cut + 1 :])
        return outer * self.sections, self.shape[self.cut] // self.sections, inner

    def tp_range(self, index: int, ways: int) -> tuple[int, int]:
        """The block [start, stop) of rank `index` of `ways`, in elements of a section of the sharded dim, or in units.

        Extents need not divide: cuts are at i * n // ways, so cuts of 2 ways are among those of 4.
        """
        if self.cut is None:
            return 0, 1
        if self.heads is None:
            return index * self.extent // ways, (index + 1) * self.extent // ways
        size = self.extent // self.heads.parts
        first, stop = self.heads.part_range(index, ways)
        return first * size, stop * size


@dataclass(frozen=True)
class Block:
    """The half-open range [start, stop) of a parameter along its cut dim, in elements of that dim, or in units.

    Where the sharded dim has several sections, the range of each. A parameter without a sharded dim has one block, (0,
    1): all of it.
    """

    param: Param
    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.stop <= self.param.extent, f"{self.param.name}: no range {self!r}"

    @classmethod
    def whole(cls, param: Param) -> Block:
        return cls(param, 0, param.extent)

    @property
    def shape(self) -> tuple[int, ...]:
        shape, cut = self.param.shape, self.param.cut
        if cut is None:
            return shape
        of_unit = sum(self.param.widths) or self.param.sections
        return (*shape[:cut], (self.stop - self.start) * of_unit, *shape[cut + 1 :])

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the middle dim of `Param.grid`, stored one behind another; of the whole parameter one."""
        param = self.param
        if not param.widths:
            return ((self.start, self.stop),)
        if self.stop - self.start == param.extent:
            return ((0, param.grid[1]),)
        firsts = [param.extent * before for before in accumulate(param.widths, initial=0)]
        return tuple(
            (first + self.start * width, first + self.stop * width)
            for first, width in zip(firsts, param.widths, strict=False)
        )

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Parameters:
    """All logical parameters of a model, in the order in which a rank lays them out.

    `aliases` maps every further name of a tied parameter to the name it is stored under.
    """

    params: tuple[Param, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    layers: int = 0
    """Layers of the model, where the last ones may have no parameters here (adapters of some layers)."""

    @classmethod
    def of(cls, layout: FlatLayout, heads: int | None = None, groups: int | None = None) -> Parameters:
        """The parameters of a model that one rank holds whole, with what pipelines and heads need to know.

        A parameter without a layer that stands before the first layer belongs to the first stage, one behind the
        layers to the last, and a tied one to both. Where they are cut, keys and values of an attention have a part per
        group; queries, outputs, sinks, what goes up from a latent, and fused projections of single heads have one per
        head; those of any other name (queries, keys and values in one) are cut anywhere, which only plans that gather
        their output allow.

        Args:
            heads, groups: query heads and key-value heads of the model; None: heads are not kept whole, nor are they of
                a parameter that does not divide into so many.
        """
        params, seen_layer = [], False
        for block in layout.blocks:
            param = block.param
            assert block == Block.whole(param), f"{param.name}: expected all of it on one rank"
            seen_layer |= param.layer is not None
            tied = param.layer is None and param.name in layout.aliases.values()
            ends: Ends = "both" if tied and not seen_layer else "last" if seen_layer else "first"
            own_heads, words = param.heads, set(param.name.split("."))
            per_head = words & _HEAD_PROJECTIONS or (words & _ATTENTIONS and words & _OUTPUTS)
            is_attention = param.cut is not None and not param.widths
            if heads is not None and is_attention and (per_head or words & _GROUP_PROJECTIONS):
                stated = Heads(heads, groups or heads, shared=bool(words & _GROUP_PROJECTIONS))
                own_heads = stated if param.extent % stated.parts == 0 else own_heads
            params.append(replace(param, ends=ends, heads=own_heads))
        return cls(tuple(params), dict(layout.aliases))

    @cached_property
    def num_layers(self) -> int:
        return max(self.layers, *(1 + param.layer for param in self.params if param.layer is not None), 0)

    @cached_property
    def num_elements(self) -> int:
        return sum(param.num_elements for param in self.params)


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
            end += aligned(block.num_elements)
        return tuple(offsets)

    @cached_property
    def num_elements(self) -> int:
        """Length of the flat buffer, the alignment gaps included (they hold zeros)."""
        return self.offsets[-1] + aligned(self.blocks[-1].num_elements) if self.blocks else 0

    @cached_property
    def entries(self) -> tuple[tuple[Block, int, int], ...]:
        """(block, start, stop) of every block, in buffer order."""
        return tuple(
            (block, start, start + block.num_elements) for block, start in zip(self.blocks, self.offsets, strict=True)
        )


def aligned(num_elements: int) -> int:
    """The next multiple of ALIGNMENT_ELEMENTS."""
    return -(-num_elements // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
