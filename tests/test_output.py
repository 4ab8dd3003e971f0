"""Where a command may write, and that what it writes appears whole or not at all."""

from __future__ import annotations

import errno
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.file_writes import why_not_written
from plait.output import MARKER, RUN_LOCK, check_file, check_folder, write_file, write_folder

Check = Callable[..., None]


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def export(folder: Path, text: str = "new") -> None:
    write_folder(folder, lambda work: (work / "config.json").write_text(text) and None, marker={"step": 3})


def a_run(folder: Path) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / RUN_LOCK).touch()
    return folder


def test_an_export_is_replaced_by_an_export_and_by_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    check_folder(out, "--out", overwrite=False)
    export(out, "old")
    assert names(tmp_path) == ["a", "a/out", "a/out/config.json", f"a/out/{MARKER}"]
    with pytest.raises(ConfigError, match="exists; give another folder, or --overwrite"):
        check_folder(out, "--out", overwrite=False)
    check_folder(out, "--out", overwrite=True)
    export(out)
    assert (out / "config.json").read_text() == "new"
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds notes.txt, which no `plait export` wrote"):
        check_folder(out, "--out", overwrite=True)


@pytest.mark.parametrize("marker", [None, "", "[]", "{", "[" * 5000, '{"format": "plait-export", "version": 1}'])
def test_a_folder_of_somebody_else_is_never_replaced(tmp_path: Path, marker: str | None) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.png").touch()
    if marker is not None:
        (tmp_path / "photos" / MARKER).write_text(marker)
    with pytest.raises(ConfigError, match="which no `plait export` wrote"):
        check_folder(tmp_path / "photos", "--out", overwrite=True)
    (tmp_path / "empty").mkdir()
    check_folder(tmp_path / "empty", "--out", overwrite=False)


@pytest.mark.parametrize("place", ["run", "run/checkpoints", "run/final", "run/new/deep", "link", "link/final"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_is_written_into_a_run_or_in_its_place(tmp_path: Path, place: str, overwrite: bool) -> None:
    a_run(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(ConfigError, match="is or lies in the run"):
        check_folder(tmp_path / place, "--out", overwrite=overwrite)


def test_the_folder_around_a_run_is_foreign_and_a_run_without_its_lock_is_known_by_being_read(tmp_path: Path) -> None:
    run = a_run(tmp_path / "runs" / "one")
    with pytest.raises(ConfigError, match="holds one, which no `plait export` wrote"):
        check_folder(run.parent, "--out", overwrite=True)
    (run / RUN_LOCK).unlink()
    with pytest.raises(ConfigError, match="is or lies in the run"):
        check_folder(run / "final", "--out", overwrite=True, inputs=[run])


def test_files_that_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    check_file(path, "--out", overwrite=False)
    path.write_text("old")
    check_file(path, "--out", overwrite=True)
    with pytest.raises(ConfigError, match="exists; give another file, or --overwrite"):
        check_file(path, "--out", overwrite=False)
    (tmp_path / "same.json").hardlink_to(path)
    with pytest.raises(ConfigError, match="is what the command reads"):
        check_file(tmp_path / "same.json", "--out", overwrite=True, inputs=[path])
    with pytest.raises(ConfigError, match="is a folder, expected a file"):
        check_file(tmp_path, "--out", overwrite=True)
    metrics = a_run(tmp_path / "run") / "metrics.jsonl"
    check_file(metrics, "--out", overwrite=False)  # a new file hurts no run
    metrics.touch()
    with pytest.raises(ConfigError, match="belongs to the run in"):
        check_file(metrics, "--out", overwrite=True)


@pytest.mark.parametrize("check", [check_file, check_folder])
def test_a_place_that_nothing_can_be_written_to_is_named_before_any_work(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for place, why in (
        ("file/out", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("new/" + "x" * 300, "File name too long"),
    ):
        with pytest.raises(ConfigError, match=f"^--out: `{tmp_path}/{place}` cannot be written: {why}; give another"):
            check(tmp_path / place, "--out", overwrite=True)
    check(tmp_path / "new" / "deep" / "out", "--out", overwrite=True)
    assert names(tmp_path) == ["file"]

    def refused(*, dir: Path) -> None:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(ConfigError, match=f"^--out: `{tmp_path}/new/out` cannot be written: Permission denied; give"):
        check(tmp_path / "new" / "out", "--out", overwrite=False)


def test_a_tilde_is_a_name_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who puts the home in its place does so before it is looked at: what is seen is what is replaced."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home" / "photos").mkdir(parents=True)
    (tmp_path / "home" / "photos" / "me.png").touch()
    check_folder(Path("~/photos"), "--out", overwrite=False)
    export(Path("~/photos"))
    assert names(tmp_path / "home") == ["photos", "photos/me.png"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_file(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def break_(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two renames fails, a signal comes behind the first, or the forcing to disk fails."""
    rename = Path.rename
    if what == "fsync":
        monkeypatch.setattr(os, "fsync", _refuse)
    elif what == "signal":

        def interrupted(self: Path, to: Path) -> None:
            rename(self, to)
            if to.name.endswith(".old"):
                raise KeyboardInterrupt

        monkeypatch.setattr(Path, "rename", interrupted)
    else:
        monkeypatch.setattr(Path, "rename", lambda self, to: _refuse() if ".tmp" in self.name else rename(self, to))


def _refuse(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("what", ["fsync", "rename", "interrupt", "signal"])
def test_a_failed_overwrite_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    export(tmp_path / "out", "old")
    before = names(tmp_path)

    def write(work: Path) -> None:
        (work / "config.json").write_text("new")
        if what == "interrupt":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if what != "interrupt":
            break_(what, patch)
        for folder in (tmp_path / "out", *([] if what == "signal" else [tmp_path / "new" / "deep" / "out"])):
            with pytest.raises((OSError, KeyboardInterrupt)):
                write_folder(folder, write, marker={})
    assert names(tmp_path) == before
    assert (tmp_path / "out" / "config.json").read_text() == "old"


def test_a_failed_file_leaves_what_was_there_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.json").write_text("old")
    break_("fsync", monkeypatch)
    with pytest.raises(OSError, match="No space"):
        write_file(tmp_path / "plan.json", "new")
    assert names(tmp_path) == ["plan.json"]
    assert (tmp_path / "plan.json").read_text() == "old"


@pytest.mark.parametrize(("umask", "rights"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_what_is_exported_has_the_rights_that_the_umask_gives(tmp_path: Path, umask: int, rights: int) -> None:
    """Safetensors makes its file for its owner alone."""

    def write(work: Path) -> None:
        (work / "model.safetensors").touch(0o600)
        (work / "config.json").touch()

    before = os.umask(umask)
    try:
        write_folder(tmp_path / "out", write, marker={"step": 3})
    finally:
        os.umask(before)
    found = {entry.name: entry.stat().st_mode & 0o777 for entry in (tmp_path / "out").iterdir()}
    assert found == dict.fromkeys(("config.json", "model.safetensors", MARKER), rights)


def test_a_process_killed_between_the_renames_loses_nothing(tmp_path: Path) -> None:
    export(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / ".out.old")

    def fail(_: Path) -> None:
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011
        write_folder(tmp_path / "out", fail)
    assert names(tmp_path) == ["out", "out/config.json", f"out/{MARKER}"]


def test_a_link_that_leads_round_is_replaced_as_a_file(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ConfigError, match="loop` exists; give another file, or --overwrite"):
        check_file(loop, "--out", overwrite=False)
    check_file(loop, "--out", overwrite=True)
    write_file(loop, "whole")
    assert loop.read_text() == "whole"


def test_what_is_said_of_a_place_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def why(number: int) -> str:
        return why_not_written(tmp_path / "new" / "file", OSError(number, os.strerror(number)))

    assert why(errno.EACCES) == "Permission denied"
    room = os.statvfs_result((512, 512, 100, 5, 4096, 10, 7, 7, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    assert why(errno.ENOSPC) == "No space left on device: 2.0 MiB are free there; free space"
    room = os.statvfs_result((512, 512, 100, 5, 4096, 10, 7, 0, 0, 255))
    assert why(errno.ENOSPC) == "No space left on device: 2.0 MiB and no further file are free there; free space"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (2048, resource.RLIM_INFINITY))
    assert why(errno.EFBIG) == "File too large: here a file may have 2,048 bytes; raise that limit (`ulimit -f`)"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert why(errno.EFBIG) == "File too large"
