"""The limit of a control group, of either version, and whom the kernel has ended in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from plait import memory_limits
from plait.memory_limits import KernelKills, limit, machine_bytes, used_bytes

GIB = 2**30


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(memory_limits, "MOUNT", tmp_path / "cgroup")
    monkeypatch.setattr(memory_limits, "GROUPS", tmp_path / "own")
    memory_limits.group_folders.cache_clear()
    yield tmp_path / "cgroup"
    memory_limits.group_folders.cache_clear()


def written(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_version_2_the_innermost_count_and_the_least_limit(mount: Path) -> None:
    (mount.parent / "own").write_text("0::/slurm/job_5\n")
    job = written(mount / "slurm", memory__max=f"{GIB}\n", memory__current="900\n", memory__stat="inactive_file 100\n")
    own = written(job / "job_5", memory__max="max\n", memory__events="low 0\noom 1\noom_kill 4\n")
    assert limit().bytes == GIB
    assert limit().group == job
    assert used_bytes() == 800, "files that can be read again are not counted"
    kills = KernelKills()
    assert kills.words() == "", "whoever sent the signal, it was not the kernel"
    written(own, memory__events="low 0\noom 2\noom_kill 6\n")
    assert kills.words() == (
        ", out of memory: the kernel has ended 2 processes for it; 1.00 GiB is all that its control group has"
    )


def test_version_1(mount: Path) -> None:
    (mount.parent / "own").write_text("9:name=systemd:/\n4:cpu,memory:/box\n0::/\n")
    own = written(
        mount / "memory" / "box",
        memory__limit_in_bytes=f"{GIB // 2}\n",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
        memory__usage_in_bytes="500\n",
        memory__stat="cache 300\ninactive_file 7\ntotal_inactive_file 200\n",
    )
    assert (limit().bytes, limit().group, used_bytes()) == (GIB // 2, own, 300)
    kills = KernelKills()
    written(own, memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert "the kernel has ended 1 process for it; 0.50 GiB is all" in kills.words()


def test_in_a_container_the_mount_is_the_group(mount: Path) -> None:
    (mount.parent / "own").write_text("0::/../../docker/abc\n")
    written(mount, memory__max=f"{GIB}\n")
    assert limit() == memory_limits.Limit(GIB, mount)


def test_without_groups_it_is_the_machine(mount: Path) -> None:
    assert (limit().bytes, limit().group) == (machine_bytes(), None)
    assert str(limit()).endswith("GiB is all that the machine has")
    assert 0 < used_bytes() < machine_bytes()
