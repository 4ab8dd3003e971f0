"""Tests read and write no profiles of the user."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from plait.cost.kept_profiles import keep_profile, kept_profiles
from plait.data.package_file import cache_folder
from tests.cost.test_profile import PROFILE
from tests.own_cache import KEPT_S, KERNELS, OwnCache, forget_old


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OwnCache:
    """In place of a user's in `tmp_path`, where a model and a profile are."""
    for variable in ("PLAIT_CACHE_OF_USER", "PLAIT_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path))
    keep_profile(PROFILE)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    return OwnCache()


def test_models_are_the_users_and_profiles_are_gone_behind_a_test(own: OwnCache) -> None:
    assert cache_folder() == own.folder
    assert (cache_folder() / "models" / "tiny").is_dir()
    assert kept_profiles(PROFILE.machine, PROFILE.device) == []
    keep_profile(PROFILE)
    assert kept_profiles(PROFILE.machine, PROFILE.device) == [PROFILE]
    own.forget_profiles()
    assert kept_profiles(PROFILE.machine, PROFILE.device) == []
    own.remove()
    assert (own.users / "models" / "tiny").is_dir()


def test_kernels_are_kept_for_other_checkouts_for_a_while(own: OwnCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the user has given no folder for them."""
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    OwnCache().remove()
    kernels = own.users / KERNELS
    assert str(kernels) == os.environ["NUMBA_CACHE_DIR"]
    new, old = kernels / "decoder-1", kernels / "decoder-0"
    for folder, age_s in ((new, 0.0), (old, KEPT_S + 60)):
        folder.mkdir(parents=True)
        (folder / "decoder.nbc").touch()
        os.utime(folder, (time.time(), time.time() - age_s))
    forget_old(kernels)
    assert [*kernels.iterdir()] == [new]
    own.remove()
