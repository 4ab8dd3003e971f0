"""How the attention of a packed batch is split into dense pieces: a pure rule, without tensors.

A piece is a run of adjacent query tokens of one group and the keys that any of them sees. Merging neighbours into one
piece saves calls and computes masked scores for nothing; cutting does the opposite. The cheapest partition of each
group is found exactly, by dynamic programming over its tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.data.packed import Group, Span

TILE_TOKENS = 192
"""Longest uncut run of one segment; a later tile of a long segment does not compute the scores of the tokens after
it, an earlier one not those before its window."""

PIECE_COST = 24_000
"""Fixed cost of a piece, forward and backward, in scores of one query head (about 4 ns each on the machine at hand)."""

MAX_MERGED_TILES = 24


@dataclass(frozen=True)
class Tile:
    """Adjacent query tokens of one segment."""

    segment: int
    """0 the prompt, 1 … the responses."""
    span: Span
    """Place in the packed row."""
    position: int
    """Position of the first token in its sample: a response goes on where the prompt ends, and that where the root."""


@dataclass(frozen=True)
class Piece:
    """Query tokens `rows`, and the keys `context` + `rows` (in that order) that they are scored against.

    A token of `context` (at most three ranges: of the root, of the prompt, of the rows' own segment) is not after any
    of the rows; without a window every row sees all of it, so that only the square of rows against rows needs a mask.
    """

    rows: Span
    context: tuple[Span, ...]

    @property
    def num_keys(self) -> int:
        return self.rows.length + sum(span.length for span in self.context)

    @property
    def num_scores(self) -> int:
        """Scores of one query head."""
        return self.rows.length * self.num_keys


NO_ROOT = Span(0, 0)


def cut(
    groups: Sequence[Group], num_heads: int, window: int | None = None, *, root: Span = NO_ROOT
) -> tuple[Piece, ...]:
    """Pieces that cover every token of the groups once as a row, at least total cost (see the top of the file).

    Args:
        root: that of the row, whose tokens are keys of every group, and no rows here.
    """
    return tuple(piece for group in groups for piece in _cheapest(_tiles(group, root), group, num_heads, window, root))


def _tiles(group: Group, root: Span) -> list[Tile]:
    tiles = []
    for segment, span in enumerate((group.prompt, *group.responses)):
        first_position = root.length + (group.prompt.length if segment else 0)
        for start in range(0, span.length, TILE_TOKENS):
            length = min(TILE_TOKENS, span.length - start)
            tiles.append(Tile(segment, Span(span.start + start, length), first_position + start))
    return tiles


def _cheapest(tiles: Sequence[Tile], group: Group, num_heads: int, window: int | None, root: Span) -> list[Piece]:
    best_cost: list[float] = [0.0]
    best_piece: list[tuple[int, Piece] | None] = [None]
    for stop in range(1, len(tiles) + 1):
        options = []
        for start in range(max(0, stop - MAX_MERGED_TILES), stop):
            if not _mergeable(tiles[start], tiles[stop - 1], root.length + group.prompt.length):
                continue
            piece = _piece(tiles[start:stop], group, window, root)
            options.append((best_cost[start] + PIECE_COST + num_heads * piece.num_scores, start, piece))
        cost, start, piece = min(options, key=lambda option: option[:2])
        best_cost.append(cost)
        best_piece.append((start, piece))
    pieces: list[Piece] = []
    stop = len(tiles)
    while stop:
        entry = best_piece[stop]
        assert entry is not None, "every prefix of the tiles has a best last piece"
        stop = entry[0]
        pieces.append(entry[1])
    return pieces[::-1]


def _mergeable(first: Tile, last: Tile, prompt_tokens: int) -> bool:
    """Whether every row of the run may see all its context: a run that begins inside a response stays in it."""
    inside_response = first.segment > 0 and first.position > prompt_tokens
    return not inside_response or last.segment == first.segment


def _piece(tiles: Sequence[Tile], group: Group, window: int | None, root: Span) -> Piece:
    first, last = tiles[0], tiles[-1]
    rows = Span(first.span.start, last.span.stop - first.span.start)
    oldest = 0 if window is None else max(0, min(tile.position for tile in tiles) - window + 1)
    context, above = [], 0
    for segment in (root, group.prompt, *group.responses[: first.segment][-1:]):
        context.append((segment.start + max(0, oldest - above), min(segment.stop, rows.start)))
        above += segment.length
    return Piece(rows, tuple(Span(start, stop - start) for start, stop in context if start < stop))
