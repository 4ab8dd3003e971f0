"""What `plait profile` says of what it measured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plait.cli import main
from plait.cost.measured import measuring
from plait.cost.profile import Profile
from plait.models import devices
from tests.cli.printed import run
from tests.cost.test_gpu_links import of_gpu
from tests.cost.test_profile import PROFILE


@pytest.mark.parametrize(
    ("profile", "copies", "said"),
    [
        (PROFILE, "copies 1.0 GB/s, between processes 0.1 GB/s", ""),
        (of_gpu(), "copies 1.0 GB/s\n", "links between GPUs not measured, taken as 360 GB/s and 5 us, a share of"),
    ],
    ids=["a CPU", "a GPU"],
)
def test_where_numbers_of_links_are_from_is_said(
    profile: Profile,
    copies: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "measure", lambda *of, quick: profile)
    monkeypatch.setattr(devices, "check_cuda", lambda dtype, key: None)  # as if there were a GPU
    code, out, _ = run(capsys, "profile", "--device", profile.device, "--out", tmp_path / "p.json")
    assert code == 0
    assert copies in out
    assert said in out
    assert ("links between" in out) == bool(said)


def test_a_python_that_cannot_look_after_processes_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(os, "waitid")
    assert main(["profile", "--model", "smollm2-135m"]) == 2
    assert "processes of ranks need Python 3.13 or newer on macOS" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(measuring, "measure", lambda *of, quick: pytest.fail("measured"))
    assert main(["profile", "--model", "smollm2-135m"]) == 2
    told = capsys.readouterr().err
    assert f"{tmp_path}/file/profiles, which cannot be written (Not a directory); set PLAIT_CACHE" in told
