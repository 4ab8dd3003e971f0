"""What a recipe asks of its `device`: what that does, and whether it is here. Checked before any work."""

from __future__ import annotations

from plait.errors import ConfigError
from plait.models.devices import check_cuda, check_cuda_dtype
from plait.recipes.plan_files import ranks_of
from plait.recipes.recipe import Recipe


def check_served(recipe: Recipe) -> None:
    """Raises ConfigError where a recipe asks for what its `device` does not do, be there one here or not."""
    if recipe.device == "cpu":
        return
    if recipe.sampling.exact:
        raise ConfigError(
            f"`sampling.exact` promises equal bits on a CPU only, and `device` is {recipe.device}; change one of them"
        )
    check_cuda_dtype(recipe.dtype, "`device`")


def ranks_on_ray(recipe: Recipe) -> int:
    """How many ranks a run asks of a Ray cluster. Raises ConfigError where nothing says it."""
    num_ranks = ranks_of(recipe.plan) or recipe.devices
    if num_ranks == 0:
        raise ConfigError("`launcher` ray: say with `devices` how many ranks the run has, or give a plan file")
    return num_ranks


def check_divided(recipe: Recipe, nodes: int, commands: int) -> None:
    """Raises ConfigError where a recipe states a number of ranks that so many commands, on so many machines, cannot
    have equally many of."""
    num_ranks = ranks_of(recipe.plan) or recipe.devices
    if num_ranks % commands:
        places = f"{nodes} nodes" if commands == nodes else f"{commands} commands (on {nodes} nodes)"
        raise ConfigError(
            f"{num_ranks} ranks cannot be divided among the {places} of this run, equally many on each; set "
            f"`devices`, or `num_ranks` of the plan file, to a multiple of {commands}"
        )


def check_device(recipe: Recipe) -> None:
    """Raises ConfigError where `device` is not to be had here."""
    if recipe.device == "cuda":
        check_cuda(recipe.dtype, "`device`")
