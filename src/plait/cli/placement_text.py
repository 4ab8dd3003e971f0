"""Placements in few words, and in which of them a plan is unlike another."""

from __future__ import annotations

from collections.abc import Sequence

from plait.cli.ranks_text import few_ranks_text
from plait.schedule.plan import Placement, Plan

MOST_CALLS_NAMED = 2


def cut_text(p: Placement) -> str:
    """Copies, ways in which matrices are cut, and stages, as far as there are several; what becomes of the memory."""
    sizes = [f"{name}{size}" for name, size in (("dp", p.dp), ("tp", p.tp), ("pp", p.pp)) if size > 1]
    words = [p.schedule] if p.schedule else []
    return " ".join([*sizes, *words, *([] if p.after == "keep" else [p.after])])


def unlike(shown: Plan, other: Plan) -> str:
    """Where the other plan has calls that the one that is shown has elsewhere, or cut otherwise; empty: it has none."""
    mine = _by_call(shown)
    changed = {call: places for call, places in _by_call(other).items() if places != mine.get(call)}
    named = [f"{call} on {_text(places, mine.get(call, []))}" for call, places in changed.items()]
    if len(named) > MOST_CALLS_NAMED + 1:  # one more call is named, too
        named[MOST_CALLS_NAMED:] = [f"{len(named) - MOST_CALLS_NAMED} more calls otherwise"]
    return ", ".join(named)


def _by_call(plan: Plan) -> dict[str, list[Placement]]:
    placements: dict[str, list[Placement]] = {}
    for p in plan.placements:
        placements.setdefault(f"{p.call} (prefill)" if p.mode == "prefill" else p.call, []).append(p)
    return placements


def _text(places: Sequence[Placement], shown: Sequence[Placement]) -> str:
    """With layers of stages, or tokens of micro-batches, where nothing else tells them from those that are shown."""
    short = _short(places)
    if short != _short(shown):
        return short
    if (stages := [p.stages for p in places]) != [p.stages for p in shown]:
        return f"{short} of {' and '.join('+'.join(map(str, layers)) for layers in stages)} layers"
    if [p.micro_batch_tokens for p in places] != [p.micro_batch_tokens for p in shown]:
        tokens = " and ".join(str(p.micro_batch_tokens or "the recipe's") for p in places)
        return f"{short} with {tokens} tokens a forward"
    return short


def _short(places: Sequence[Placement]) -> str:
    return " and ".join(f"{few_ranks_text(p.ranks)} {cut_text(p)}".rstrip() for p in places)
