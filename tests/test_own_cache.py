"""Tests read and write no profiles of the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.cost.kept_profiles import keep_profile, kept_profiles
from plait.data.package_file import cache_folder
from tests.cost.test_profile import PROFILE
from tests.own_cache import OwnCache


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
