"""Plan files in one line for each call: `{"actor.train": "0,1 tp2"}`. Imports no plait."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_MODES = {"generate": "decode", "train": "train"}


def write_plan(
    folder: Path,
    name: str,
    places: dict[str, str],
    schedules: Sequence[str] = (),
    policies: Mapping[str, Mapping[str, float]] | None = None,
) -> Path:
    """`places`: call → its ranks, and dp, tp and pp where they are not 1; `schedule=gpipe` and the like behind them.
    Instances of different size stand beside each other: "0,1 tp2 | 2". A mode may stand behind a call:
    "actor.generate prefill". `schedules`: the texts of their files; `policies`: name → settings."""
    placements = [_placement(call, text) for call, texts in places.items() for text in texts.split("|")]
    num_ranks = 1 + max(rank for placement in placements for rank in placement["ranks"])
    tree: dict[str, Any] = {
        "format": "plait-plan",
        "version": 1,
        "name": name,
        "num_ranks": num_ranks,
        "placements": placements,
    }
    tree |= {"schedules": [json.loads(text) for text in schedules]} if schedules else {}
    tree |= {"policies": [{"name": one, "settings": dict(of)} for one, of in (policies or {}).items()]}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(tree))
    return path


def _placement(call: str, text: str) -> dict[str, Any]:
    ranks, *words = text.split()
    sizes = {word[:2]: int(word[2:]) for word in words if word[:2] in ("dp", "tp", "pp")}
    options: dict[str, Any] = dict(word.split("=") for word in words if "=" in word)
    if "micro_batch_tokens" in options:
        options["micro_batch_tokens"] = int(options["micro_batch_tokens"])
    call, _, stated = call.partition(" ")
    mode = stated or _MODES.get(call.rpartition(".")[2], "score")
    return {"call": call, "mode": mode, "ranks": [int(rank) for rank in ranks.split(",")], **sizes, **options}
