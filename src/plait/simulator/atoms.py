"""Ranks that are in the same masks count as one: so a simulated step costs as much on 128 devices as on 2."""

from __future__ import annotations

Ranks = dict[int, frozenset[int]]
_known: dict[tuple[int, ...], Ranks] = {}


def atoms_of(masks: tuple[int, ...]) -> Ranks:
    """Each mask, and the union of all, as a set of atoms; ranks that are in the same masks are one atom."""
    by_mask = _known.get(masks)
    if by_mask is None:
        atoms: list[int] = []
        for mask in dict.fromkeys(masks):
            rest, cut = mask, []
            for atom in atoms:
                cut += [part for part in (atom & mask, atom & ~mask) if part]
                rest &= ~atom
            atoms = [*cut, rest] if rest else cut
        everywhere = 0
        for mask in masks:
            everywhere |= mask
        by_mask = {
            mask: frozenset(number for number, atom in enumerate(atoms) if atom & mask) for mask in {*masks, everywhere}
        }
        if len(_known) > 100_000:
            _known.clear()
        _known[masks] = by_mask
    return by_mask
