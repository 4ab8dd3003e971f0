"""Files of profiles: where they are kept, by machine, model, dtype and threads, how they are written. Torch-free."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import astuple
from functools import cache
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryFile

from pydantic import ValidationError

from plait.cost.hardware import GIB, known_device
from plait.cost.profile import MOVE, Profile
from plait.data.package_file import cache_folder
from plait.errors import ConfigError, DataError
from plait.file_form import FileForm
from plait.observe.screen import say
from plait.output import write_file
from plait.settings import what_is_refused

FORM = FileForm("profile")


def save_profile(profile: Profile, path: Path) -> None:
    """
    Raises:
        OSError: it cannot be written.
    """
    record = {**FORM.head, **profile.model_dump(mode="json")}
    write_file(path, json.dumps(record, indent=1) + "\n")


def load_profile(path: Path) -> Profile:
    """
    Raises:
        DataError: it cannot be read, or a key is missing, unknown or does not fit.
    """
    record = FORM.read(path)
    try:
        read = Profile.model_validate({key: value for key, value in record.items() if key not in ("format", "version")})
        return _without_gloo(read if "moves_by" in record else _without_moves(read))
    except ValidationError as error:
        raise DataError(f"{path}: {what_is_refused(error)}") from None


def _without_gloo(profile: Profile) -> Profile:
    """A GPU's profile without what two processes sent each other over gloo, through their CPUs, and without the runs
    that were predicted by it: of GPUs' links it says nothing."""
    if profile.device != "cuda" or profile.links_over == "nccl":
        return profile
    alone = tuple(run for run in profile.runs if run.devices == 1)
    unknown = {"send": None, "all_reduce": None, "between": None}
    host = profile.host or profile.send
    return profile.model_copy(update={**unknown, "host": host, "links_over": "nccl", "runs": alone})


def _without_moves(profile: Profile) -> Profile:
    """A profile of when moves of weights were predicted by the link of sums, without what its runs say of moves."""
    kinds = [{kind: of_kind for kind, of_kind in run.kinds.items() if kind != MOVE} for run in profile.runs]
    runs = [run.model_copy(update={"kinds": kept}) for run, kept in zip(profile.runs, kinds, strict=True)]
    return profile.model_copy(update={"runs": tuple(runs)})


def profile_path(profile: Profile) -> Path:
    """Where it is kept: by the machine, the model's name with a digest of its shape's numbers (one folder may have one
    model after another), the dtype and the threads."""
    numbers = tuple(number for number in astuple(profile.shape) if isinstance(number, int))
    digest = blake2b(repr(numbers).encode(), digest_size=4).hexdigest()
    words = (profile.machine, profile.model, digest, profile.dtype, str(profile.threads))
    name = re.sub(r"[^a-z0-9.]+", "-", " ".join(words).lower()).strip("-")
    return cache_folder() / "profiles" / f"{name}.json"


def kept_profiles(machine: str, device: str) -> list[Profile]:
    """Those of this machine that are kept; a file that cannot be read, which is said, or that has not the name of its
    profile, is none."""
    return [profile for profile in _all_kept() if (profile.machine, profile.device) == (machine, device)]


def profiles_of_gpu(name: str) -> list[Profile]:
    """Those that are kept of machines with a GPU of `hardware.DEVICES`."""
    kept = [(profile, int(profile.memory_gib * GIB)) for profile in _all_kept() if profile.device == "cuda"]
    known = [(profile, known_device(profile.machine, num_bytes)) for profile, num_bytes in kept]
    return [profile for profile, device in known if device is not None and device.name == name]


def _all_kept() -> list[Profile]:
    profiles = []
    for path in sorted((cache_folder() / "profiles").glob("*.json")):
        try:
            profile = load_profile(path)
        except DataError as error:
            _say_left_out(str(error))
            continue
        if path == profile_path(profile):
            profiles.append(profile)
    return profiles


@cache
def _say_left_out(error: str) -> None:
    """Once, as kept profiles are read again and again."""
    say(f"a kept profile is ignored: {error}", file=sys.stderr)


def check_kept() -> None:
    """See that profiles can be kept, before one is measured.

    Raises:
        ConfigError: their folder cannot be written.
    """
    folder = cache_folder() / "profiles"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"the profile would be kept in {folder}, which cannot be written ({error.strerror}); set PLAIT_CACHE to a "
            "folder that can be, or name a file with --out"
        ) from None


def keep_profile(profile: Profile) -> Path:
    """Write it to where it is kept; returns the file.

    Raises:
        OSError: it cannot be written.
    """
    path = profile_path(profile)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_profile(profile, path)
    return path
