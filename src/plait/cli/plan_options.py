"""The options that `plait plan` and `plait simulate` share, and what they are asked about: a recipe on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from plait.cli.app import Number, Whole
from plait.errors import ConfigError

if TYPE_CHECKING:
    from plait.cost.cluster import ClusterSpec
    from plait.recipes.recipe import Recipe
    from plait.runtime.prediction.planning import Planning
    from plait.runtime.prediction.predictable import Coming

Keys = Annotated[str, Parameter(allow_leading_hyphen=True)]
"""A token of the recipe's keys behind it, `--model llama-2-13b`."""

OFFERED = ("--cluster", "--lengths", "--acceptance-rate", "--acceptance-length", "--json")
"""Offered where a key is near to them; others are near to keys."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OnCluster:
    """Each field is an option."""

    cluster: str | None = None
    """A file, or a name such as 16xH100; this machine when left out."""
    devices: Whole | None = None
    """Number of devices, in place of the cluster's."""
    lengths: str | None = None
    """Response tokens: 512, or MEDIAN~SIGMA, either after PROMPT: tokens (128:300~0.8), or a run's folder. Without
    PROMPT: the data's prompts are read."""
    acceptance_rate: Number | None = None
    """With sampling.speculation: share of accepted draft tokens, in place of what runs measured."""
    acceptance_length: Number | None = None
    """Tokens per sample in a step with drafts: accepted draft tokens plus one. With speculation auto state both, with a
    number one of them."""
    stage: str | None = None
    """Which stage of a recipe with several stages."""
    overwrite: bool = False
    """Replace files that exist."""
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False
    """Print the result as JSON."""

    def planning(
        self, path: Path, keys: Sequence[str], plan: str | None = None, *, offered: Sequence[str] = ()
    ) -> Planning:
        """What is known of the recipe there.

        Args:
            keys: `--key value`, in place of the file's.
            offered: options that the command has besides, offered where a key is near to them.
            plan: a plan file, whose ranks are the devices where nothing else says how many.

        Raises:
            UserError: the recipe, a key, `--devices`, the cluster, the lengths or the acceptance cannot be used; or no
                cluster is named, and this machine has no device of the recipe's.
        """
        if self.devices is not None and self.devices < 1:
            raise ConfigError(f"--devices: expected at least 1, found {self.devices}")
        recipe, to_come = self._recipe(path, keys, (*OFFERED, *offered))
        from plait.cost.calibration import of_cluster
        from plait.cost.cluster_file import read_cluster
        from plait.cost.kept_profiles import profiles_of_gpu
        from plait.cost.placement import num_devices
        from plait.recipes.plan_files import ranks_of
        from plait.runtime.prediction.draft_forecast import Acceptance
        from plait.runtime.prediction.lengths import lengths_of
        from plait.runtime.prediction.machine import machine_of
        from plait.runtime.prediction.planning import Planning
        from plait.runtime.prediction.refinement import recorded_drafts
        from plait.runtime.prepare import data_lengths, outline

        ranks = ranks_of(plan or recipe.plan)
        if self.cluster is None:
            _check_here(recipe.device)
            foreseen = outline(recipe, to_come=to_come)
            count = self.devices or ranks or num_devices(recipe)
            spec, source = machine_of(recipe, foreseen.shapes[recipe.model], count)
        else:
            spec = read_cluster(self.cluster, self.devices)
            _check_device(recipe.device, spec)
            source = of_cluster(spec, profiles_of_gpu(spec.device.name))
            foreseen = outline(recipe, to_come=to_come, device_memory=spec.device.memory_bytes)
        sizes = lengths_of(self.lengths, foreseen, lambda: data_lengths(foreseen))
        drafted = recorded_drafts(self.lengths)
        stated = Acceptance(self.acceptance_rate, self.acceptance_length)
        if stated.is_stated:
            stated.check(foreseen.recipe.sampling, foreseen.flow)
        known = foreseen.recipe, foreseen.flow, foreseen.models, foreseen.shapes
        return Planning(*known, spec, sizes, source, drafts=drafted, acceptance=stated, to_come=to_come)

    def _recipe(self, path: Path, keys: Sequence[str], offered: Sequence[str]) -> tuple[Recipe, Coming]:
        """The recipe, or that of the stage, and the models that earlier stages make for it."""
        from plait.recipes.keys import is_setting, nearest, parse_overrides
        from plait.recipes.stages import load_stages, stage_names, unknown_in
        from plait.recipes.trust import user_recipe

        is_path = not is_setting(str(path))
        names = stage_names(path) if is_path else ()
        tokens = keys if is_path else (str(path), *keys)  # what is no path is refused
        overrides = parse_overrides(tokens, offered, names, partial(unknown_in, path if is_path else None))
        if not names:
            if self.stage is not None:
                raise ConfigError(f"--stage: {path} has no stages, found `{self.stage}`; leave it out")
            return user_recipe(path, overrides, trust_run_code=False), {}
        if self.stage not in names:
            stated = "nothing" if self.stage is None else f"`{self.stage}`{nearest(self.stage, names)}"
            raise ConfigError(
                f"--stage: {path} has several, each with a plan of its own: {', '.join(names)}; found {stated}"
            )
        stages = load_stages(path, overrides)
        return stages.foreseen(self.stage), stages.to_come(self.stage)


def _check_here(device: str) -> None:
    """Raises ConfigError where a recipe computes on GPUs, and this machine, which is the cluster, has none."""
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                "--cluster: `device` of the recipe is cuda, but torch finds no CUDA device here; name a cluster "
                "(`--cluster 8xH100`), or give `--device cpu`"
            )


def _check_device(device: str, spec: ClusterSpec) -> None:
    """Raises ConfigError where a recipe computes on CPUs, and the cluster has GPUs that plait knows."""
    from plait.cost.hardware import DEVICES

    devices = [kind.device for kind in spec.kinds] or [spec.device]
    if device == "cpu" and any(known in devices for known in DEVICES.values()):
        raise ConfigError(
            f"key `device`: expected cuda, for a cluster of {spec.device.name}, found cpu; give `--device cuda`"
        )
