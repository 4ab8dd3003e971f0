"""Where the seconds of a prediction come from, and how far off they have been: a kept profile that fits a run, or the
nearest one, scaled. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plait.cost.cluster import ClusterSpec
from plait.cost.model_work import ModelWork
from plait.cost.profile import Points, Profile, RunRecord
from plait.models.shape import ModelShape
from plait.training.memory import BYTES

OTHER_DTYPE = 0.5
"""What another dtype adds to the error: seconds are scaled by the bytes of a number, as it is computed."""
OTHER_THREADS = 0.25
"""What each doubling or halving of the threads adds, over which seconds are divided."""
OTHER_LAYERS = 0.1
"""What each doubling or halving of a layer's weights adds, by which seconds are scaled."""
SMALL_LAYER, MOST_LARGER = 1 << 20, 4
"""Weights of a layer below which it takes what its operators take, however little they compute: nothing follows from it
for layers that have more than so many times as many."""


@dataclass(frozen=True)
class Calibration:
    """
    source:  in words
    error:   |predicted / measured - 1| of the seconds of a step: the mean of past runs, else what the profile
             says of itself with what scaling adds; None: nothing is known
    kinds:   of past runs, the same of each kind of call
    runs:    past runs that `error` is the mean of
    profile: what was measured; None: the cluster's numbers are used
    exact:   whether the profile is of this dtype, these threads and layers of this shape
    """

    source: str
    error: float | None = None
    kinds: Mapping[str, float] = field(default_factory=dict)
    runs: int = 0
    profile: Profile | None = None
    exact: bool = False


VENDORS = Calibration("vendors' numbers and default shares of them")


def of_cluster(cluster: ClusterSpec, profiles: Sequence[Profile]) -> Calibration:
    """The calibration of predictions by a cluster's own numbers: as its file says; else as past runs on such devices
    were predicted, by profiles of these.

    Args:
        profiles: of the cluster's devices, where any are kept.
    """
    if cluster.checked is not None:
        return Calibration(cluster.checked.source, cluster.checked.error)
    past = [run for profile in profiles for run in profile.past(cluster.num_devices)]
    if not past:
        return VENDORS
    machines = " and ".join(sorted({profile.machine for profile in profiles if profile.runs}))
    source = f"{VENDORS.source}; {_runs(len(past))} on {machines}, predicted by what was measured there, were"
    return Calibration(source, *_errors(past))


def uncorrected(profile: Profile) -> Profile:
    """As it was measured, before any run."""
    return profile.model_copy(update={"runs": ()})


def calibrated(
    profiles: Sequence[Profile], shape: ModelShape, dtype: str, threads: int, devices: int = 1
) -> Calibration:
    """By the profile that is nearest to a run, scaled to it.

    Args:
        profiles: of one machine; one at least.
        devices: processes of the run: past runs of as many say how far off predictions are, where there are any.
    """
    best = min(
        profiles,
        key=lambda profile: (distance(profile, shape, dtype, threads), profile.model, profile.dtype, profile.threads),
    )
    added = distance(best, shape, dtype, threads)
    chosen = best if added == 0 else _scaled(best, dtype, threads)
    label = f"what was measured with {best.model} in {best.dtype}, {best.threads} thread{'s' * (best.threads > 1)}"
    if added > 0:
        label += f", scaled to this run (± {added:.0%})"
    past = chosen.past(devices) if added == 0 else ()
    if not past:
        return Calibration(label, best.error + added, profile=chosen, exact=added == 0)
    corrected = f"{label}, corrected by {_runs(len(past))}"
    if not any(run.devices == devices for run in past):
        corrected += f" on other numbers of devices than {devices}"
    return Calibration(corrected, *_errors(past), chosen, exact=True)


def _runs(count: int) -> str:
    return f"{count} run{'s' * (count > 1)}"


def _errors(past: Sequence[RunRecord]) -> tuple[float, dict[str, float], int]:
    """The mean error of a step in past runs, that of each kind of call, and how many runs they are."""
    kinds = {
        kind: sum(values) / len(values)
        for kind in sorted({kind for run in past for kind in run.errors})
        if (values := [run.errors[kind] for run in past if kind in run.errors])
    }
    return sum(run.error for run in past) / len(past), kinds, len(past)


def speaks_for(profile: Profile, shape: ModelShape) -> bool:
    """Whether seconds of the profile's layers, scaled by their weights, say anything of layers of this shape."""
    mine, other = (ModelWork(size, profile.dtype, 1).products(1) / 2 for size in (shape, profile.shape))
    return other >= SMALL_LAYER or mine <= MOST_LARGER * other


def distance(profile: Profile, shape: ModelShape, dtype: str, threads: int) -> float:
    """What scaling a profile to a run adds to its error; 0: nothing is scaled."""
    mine, other = (ModelWork(size, dtype, 1).products(1) for size in (shape, profile.shape))
    return (
        OTHER_DTYPE * (profile.dtype != dtype)
        + OTHER_THREADS * abs(math.log2(threads / profile.threads))
        + OTHER_LAYERS * abs(math.log2(mine / other))
    )


def _scaled(profile: Profile, dtype: str, threads: int) -> Profile:
    """As another dtype and other threads would take; other shapes are scaled where seconds are asked for."""
    factor = BYTES[dtype] / BYTES[profile.dtype] * profile.threads / threads
    computing = _computed_bytes(dtype, profile) / _computed_bytes(profile.dtype, profile) * profile.threads / threads
    points = lambda measured: tuple((size, computing * seconds) for size, seconds in measured)
    steps = lambda measured: tuple((samples, context, factor * seconds) for samples, context, seconds in measured)
    rates: Points = tuple((rows, rate / computing) for rows, rate in profile.products)
    return profile.model_copy(
        update={
            "dtype": dtype,
            "threads": threads,
            "forward": points(profile.forward),
            "backward": points(profile.backward),
            "prompts": points(profile.prompts),
            "decode": steps(profile.decode),
            "decode_by_layers": steps(profile.decode_by_layers),
            "head": points(profile.head),
            "head_backward": points(profile.head_backward),
            "drawing": tuple((samples, factor * seconds) for samples, seconds in profile.drawing),
            "products": rates,
        }
    )


def _computed_bytes(dtype: str, profile: Profile) -> int:
    """Bytes of a number in products of many rows."""
    return max(BYTES["float32"], BYTES[dtype]) if profile.widens else BYTES[dtype]
