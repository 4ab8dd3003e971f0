"""An actor and its reference, and calls of the actor."""

from __future__ import annotations

from typing import Any

from plait.recipes.role_models import RoleModel
from plait.schedule.plan import After, Placement

ACTOR = RoleModel("actor", "tiny", scalar=False, trained=True, key="model")
REF = RoleModel("ref", "tiny", scalar=False, trained=False, key="model")


def train(ranks: tuple[int, ...] = (0,), after: After = "keep", **sizes: Any) -> Placement:
    return Placement("actor.train", "train", ranks, after=after, **sizes)


def generate(ranks: tuple[int, ...] = (0,), after: After = "keep", **sizes: Any) -> Placement:
    return Placement("actor.generate", "decode", ranks, after=after, **sizes)
