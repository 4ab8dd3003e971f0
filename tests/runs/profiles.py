"""A kept profile of this machine for a recipe's model, made up: a run with a searched plan measures nothing."""

from __future__ import annotations

from plait.cost.kept_profiles import keep_profile
from plait.cost.machine import machine_name
from plait.cost.profile import LinkRecord, Profile
from plait.models.files.hub import read_config
from plait.models.shape import ModelShape
from plait.recipes.recipe import Recipe


def keep_made_up_profile(recipe: Recipe, layer_s: float = 1.0) -> Profile:
    """A layer takes seconds: more than any tiny model's."""
    rates = LinkRecord(bytes_per_s=1e9, latency_s=1e-4)
    profile = Profile(
        machine=machine_name("cpu"),
        device="cpu",
        threads=1,
        dtype=recipe.dtype.value,
        model=recipe.model,
        shape=ModelShape.from_config(read_config(recipe.model), recipe.model),
        memory_gib=8.0,
        forward=((16, layer_s), (64, 2 * layer_s)),
        backward=((16, 1.0), (64, 2.0)),
        decode=((1, 64, 1.0), (8, 64, 2.0)),
        head=((16, 1.0), (64, 2.0)),
        products=((16, 1e9),),
        copy_bytes_per_s=1e9,
        send=rates,
        all_reduce=rates,
        error=0.1,
    )
    keep_profile(profile)
    return profile
