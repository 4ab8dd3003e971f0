"""What this machine takes, for predictions of a run: by the kept profile that fits it or comes nearest, measured before
where a run wants one of its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from plait.cost.calibration import Calibration, calibrated, speaks_for
from plait.cost.cluster import ClusterSpec
from plait.cost.gpu_links import links_of
from plait.cost.kept_profiles import kept_profiles
from plait.cost.machine import machine_name, threads_alone, unmeasured
from plait.launch.machine import usable_cores
from plait.models.shape import ModelShape
from plait.observe.loading import loading
from plait.observe.screen import say
from plait.recipes.recipe import Recipe

MEASURE_S = {"cpu": 120.0, "cuda": 300.0}
"""After which a run goes on without having measured, by what is kept, or what its kind does. On a GPU torch compiles
for a minute or two of it."""

_ERROR = "error: "
"""What a command begins its own errors with, which further lines may follow."""


def machine_of(recipe: Recipe, shape: ModelShape, devices: int) -> tuple[ClusterSpec, Calibration]:
    """So many processes of this machine, and where their seconds come from.

    Args:
        shape: of the run's own model.
    """
    kept = kept_profiles(machine_name(recipe.device), recipe.device)
    profiles = [profile for profile in kept if speaks_for(profile, shape)]
    threads = threads_of(recipe, devices)
    if not profiles:
        return unmeasured(recipe.device, devices, threads)
    calibration = calibrated(profiles, shape, recipe.dtype.value, threads, devices)
    profile = calibration.profile
    assert profile is not None, "calibrated by no profile"
    if recipe.device == "cpu":
        return profile.cluster(devices), calibration
    links = links_of(profile)
    source = f"{calibration.source}; {links.label}" if devices > 1 else calibration.source
    return profile.cluster(devices, links.effective), replace(calibration, source=source)


def measured_machine(recipe: Recipe, shape: ModelShape, devices: int) -> tuple[ClusterSpec, Calibration]:
    """As `machine_of`; where no kept profile is of this model's layers, dtype and threads, a short one is measured and
    kept, once. Where that fails, what there is is taken, and the reason is said."""
    cluster, calibration = machine_of(recipe, shape, devices)
    if calibration.exact:
        return cluster, calibration
    loading("what this machine takes for a layer of the model: measured now, for half a minute or more, and kept")
    if trouble := _measure(recipe, threads_of(recipe, devices)):
        say(f"predictions are by {calibration.source}: {trouble}", file=sys.stderr)
    return machine_of(recipe, shape, devices)


def threads_of(recipe: Recipe, devices: int) -> int:
    """CPU threads of each process of a run."""
    if devices == 1:
        return threads_alone(recipe.threads)
    return recipe.threads or max(1, usable_cores() // devices)


def _measure(recipe: Recipe, threads: int) -> str:
    """In a process of its own: nothing of it stays here. Why it failed, or nothing."""
    within_s = MEASURE_S[recipe.device]
    choices = ("--model", recipe.model, "--dtype", recipe.dtype.value, "--device", recipe.device)
    command = [sys.executable, "-m", "plait", "profile", *choices, "--threads", str(threads), "--quick"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=within_s)
    except subprocess.TimeoutExpired:
        return f"`plait profile` took more than {within_s:.0f} s"
    except OSError as error:
        return f"`plait profile` could not be started: {error}"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    said = next((line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)), lines[-1])
    return f"`plait profile` failed: {said}"
