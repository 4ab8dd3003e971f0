"""Compiled functions on disk: taken while all files that they are made of are as they were, and else made anew."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any

import pytest
from numba.core.errors import TypingError

from plait import compiled, file_lock
from plait.file_lock import alone_at
from plait.kernels import decoder, draw

pytestmark = pytest.mark.skipif(not compiled.AVAILABLE, reason="numba is not installed")

HELPER = """
from plait.compiled import njit

@njit()
def factor():
    return {factor}
"""
CALLER = """
from package.helper import factor
from plait.compiled import njit

@njit()
def times(x):
    return x * factor()
"""
ALONE = """
from plait.compiled import njit

@njit()
def times(x):
    return x * {factor}
"""
MAIN = "from package.caller import times; print(times(7), sum(times.stats.cache_hits.values()))"


def run(folder: Path, code: str = MAIN) -> tuple[int, int, str]:
    """(result, functions found on disk, what it said) of a process that calls `times`. Python itself keeps no code: it
    takes an edit within a second, of as many characters, for the same file."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(folder), "NUMBA_CACHE_DIR": "", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    result, hits = map(int, done.stdout.split())
    return result, hits, done.stderr


def test_a_changed_helper_is_compiled_anew(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helper.py").write_text(HELPER.format(factor=2))
    (package / "caller.py").write_text(CALLER)
    notice = "plait: compiling kernels for this CPU, a minute or two in all (kept for later runs)\n"
    assert run(tmp_path) == (14, 0, notice)
    kept = {path.name for path in (package / "__pycache__").glob("*.nb?")}
    assert len(kept) == 4, "an index and the code of each function"
    assert run(tmp_path) == (14, 1, "")
    (package / "helper.py").write_text("# It moves down.\n" + HELPER.format(factor=3))
    assert run(tmp_path) == (21, 0, notice)
    assert {path.name for path in (package / "__pycache__").glob("*.nb?")} == kept, "the old code is overwritten"


EDITED = """
from package.caller import times
from pathlib import Path
helper = Path(__import__("package.helper").helper.__file__)
helper.write_text(helper.read_text().replace("return 2", "return 3"))
print(times(7), sum(times.stats.cache_hits.values()))
"""


def test_what_was_edited_after_its_import_is_not_kept_as_the_new_text(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helper.py").write_text(HELPER.format(factor=2))
    (package / "caller.py").write_text(CALLER)
    assert run(tmp_path, EDITED)[:2] == (14, 0), "the code that was imported"
    assert run(tmp_path)[:2] == (21, 0)


def loaded(folder: Path, factor: int) -> Any:
    """`times` of a package of its own there, a file that is imported in this process."""
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "__init__.py").touch()
    file = folder / "package" / "times.py"
    file.write_text(ALONE.format(factor=factor))
    spec = util.spec_from_file_location(f"times_in_{folder.name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.times


def test_in_a_folder_that_is_given_installations_of_one_text_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from numba.core import config

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "given"))
    one, same, other = (loaded(tmp_path / name, factor) for name, factor in (("one", 2), ("same", 2), ("other", 3)))
    assert [times(7) for times in (one, other, same)] == [14, 21, 14]
    assert [sum(times.stats.cache_hits.values()) for times in (one, other, same)] == [0, 0, 1]
    assert len({*(tmp_path / "given").iterdir()}) == 2, "a folder of each text, and none takes the other's place"


def test_one_process_at_a_time_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core import caching, config

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "given"))
    save, saved = caching.IndexDataCacheFile.save, []

    def watched(self: Any, key: Any, data: Any) -> None:
        (lock,) = (tmp_path / "given").glob("*/*.lock")
        with lock.open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        saved.append(key)
        save(self, key, data)

    monkeypatch.setattr(caching.IndexDataCacheFile, "save", watched)
    times = loaded(tmp_path / "one", 2)
    assert (times(7), times(1.5), len(saved)) == (14, 3.0, 2)
    (lock,) = (tmp_path / "given").glob("*/*.lock")
    with lock.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_who_does_not_let_go_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiled, "LOCK_S", 0.1)
    waited: list[float] = []
    with alone_at(tmp_path / "kept.lock", 0):
        monkeypatch.setattr(file_lock.time, "sleep", waited.append)
        with compiled.lock_of(tmp_path) as is_alone:
            assert not is_alone
        waits = len(waited)
        with compiled.lock_of(tmp_path) as is_alone:
            assert not is_alone
    assert waits == len(waited) > 0
    said = capsys.readouterr().err
    assert said.count("compiled kernels are not kept for later runs: process ") == 1
    assert f"has had {tmp_path}/kept.lock for 0.1 s" in said
    with compiled.lock_of(tmp_path) as is_alone:
        assert is_alone


def test_where_nothing_can_be_locked_saving_is_tried_all_the_same(tmp_path: Path) -> None:
    with compiled.lock_of(tmp_path / "gone") as is_alone:
        assert is_alone


def test_without_a_folder_to_keep_it_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """A read-only installation of a user without a home: compiled in every process."""
    from numba.core import caching

    def refuse(self: object) -> None:
        raise OSError("read only")

    monkeypatch.setattr(caching._CacheLocator, "ensure_cache_path", refuse)
    monkeypatch.setattr(compiled, "ANNOUNCEMENT", compiled.Announcement())

    def double(x: int) -> int:
        return 2 * x

    assert compiled.njit()(double)(4) == 8
    assert "set NUMBA_CACHE_DIR" in capsys.readouterr().err


def test_a_rank_has_the_one_that_shows_progress_say_that_it_compiles(capsys) -> None:
    """What it prints goes into its log, and its first step takes minutes."""
    told: list[str] = []
    announcement = compiled.Announcement(told.append)
    for _ in range(2):
        announcement.begins(kept=True)
    assert told == ["compiling kernels for this CPU, a minute or two in all (kept for later runs)"]
    assert capsys.readouterr().err == ""


def test_compiling_that_takes_long_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time that it takes, that of functions within others counted once, and not the time between."""
    told: list[str] = []
    clock_s = [0.0]
    monkeypatch.setattr(compiled.time, "monotonic", lambda: clock_s[0])
    announcement = compiled.Announcement(told.append)

    def passed(seconds: float, call: Callable[[], None]) -> list[str]:
        clock_s[0] += seconds
        before = len(told)
        call()
        return told[before:]

    begins = partial(announcement.begins, kept=True)
    assert len(passed(0, begins)) == 1
    assert passed(80, announcement.ends) == []
    assert passed(1000, begins) == [], "nothing was compiled meanwhile"
    assert passed(5, begins) == []
    assert passed(35, announcement.ends) == ["still compiling kernels for this CPU, 2 min so far"]
    assert passed(100, announcement.ends) == []
    assert passed(0, begins) == []
    assert passed(20, announcement.ends) == ["still compiling kernels for this CPU, 4 min so far"]


def test_what_cannot_be_compiled_is_not_counted_as_being_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all of the time after it would be told as time of compiling."""
    told: list[str] = []
    clock_s = [0.0]
    announcement = compiled.Announcement(told.append)
    monkeypatch.setattr(compiled, "ANNOUNCEMENT", announcement)
    monkeypatch.setattr(compiled.time, "monotonic", lambda: clock_s[0])

    def half(x: int) -> int:
        return x / "two"

    def double(x: int) -> int:
        return 2 * x

    with pytest.raises(TypingError):
        compiled.njit()(half)(4)
    clock_s[0] += 1000
    assert compiled.njit()(double)(4) == 8
    assert [line.split(",")[0] for line in told] == ["compiling kernels for this CPU"]


@pytest.mark.parametrize(
    ("module", "made_of"),
    [
        (
            decoder,
            {
                "kernels/paged_attention",
                "kernels/scores",
                "kernels/row_intrinsics",
                "kernels/matrix_attention",
                "kernels/products",
                "kernels/vector_intrinsics",
                "kernels/product_intrinsics",
                "kernels/attention_intrinsics",
                "kernels/matrix_intrinsics",
                "kernels/matrix_attention_intrinsics",
                "kernels/scalar_intrinsics",
                "compiled",
            },
        ),
        (draw, {"kernels/noise", "kernels/scalar_intrinsics", "compiled"}),
    ],
    ids=["decoder", "draw"],
)
def test_what_the_stamp_covers(module, made_of: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's stamp changes with each file whose code or constants are in it."""
    read = compiled._read
    before = compiled.stamp(module.__file__)
    for name in made_of:

        def changed(path: Path, mtime_ns: int, size: int, name: str = name):
            digest, imported = read(path, mtime_ns, size)
            return (digest + "!" if path.as_posix().endswith(f"plait/{name}.py") else digest), imported

        monkeypatch.setattr(compiled, "_read", changed)
        assert compiled.stamp(module.__file__) != before, name
    monkeypatch.setattr(compiled, "_read", read)
    assert compiled.stamp(module.__file__) == before
