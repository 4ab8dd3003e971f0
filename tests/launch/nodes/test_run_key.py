"""Where the key of a run over several nodes is, and who may read it."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.file_lock import is_taken
from plait.launch.nodes import run_key
from plait.launch.nodes.run_key import FILE, leaders_key, nodes_key


def test_the_key_is_in_a_file_that_nobody_else_reads_or_in_a_variable(tmp_path: Path) -> None:
    assert nodes_key(tmp_path, {}) is None
    with leaders_key(tmp_path, {}) as key:
        assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
        assert nodes_key(tmp_path, {}) == key
        (tmp_path / FILE).chmod(0o644)
        with pytest.raises(ConfigError, match=r"may be read by others \(mode 644\)"):
            nodes_key(tmp_path, {})
    assert not (tmp_path / FILE).exists()
    said = {"PLAIT_RUN_KEY": "correct horse battery"}
    with leaders_key(tmp_path, said) as key:
        assert not (tmp_path / FILE).exists()
        assert nodes_key(tmp_path, said) == key
    with pytest.raises(ConfigError, match="at least 16 characters"):
        nodes_key(tmp_path, {"PLAIT_RUN_KEY": "short"})


def test_the_key_of_a_leader_who_is_there_stays(tmp_path: Path) -> None:
    with leaders_key(tmp_path, {}) as key:
        with (
            pytest.raises(ConfigError, match=r"another command leads a run in this folder.*nodes\.key"),
            leaders_key(tmp_path, {}),
        ):
            pass
        assert nodes_key(tmp_path, {}) == key
    with leaders_key(tmp_path, {}) as other:
        assert other != key


LEADS = """
import os, signal, sys
from pathlib import Path
from plait.file_lock import is_taken
from plait.launch.nodes import run_key
from plait.launch.nodes.run_key import leaders_key
with leaders_key(Path(sys.argv[1]), {}):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.process
def test_the_key_of_a_leader_that_was_killed_is_replaced(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", LEADS, str(tmp_path)], timeout=60).returncode == -9
    stale = nodes_key(tmp_path, {})
    assert stale is not None, "nobody has removed it"
    with leaders_key(tmp_path, {}) as key:
        assert nodes_key(tmp_path, {}) == key != stale
    assert not (tmp_path / FILE).exists()


def test_a_leader_whose_file_another_has_replaced_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both begin at once: its file was removed before it had the lock."""

    def removed(file: int, path: Path) -> bool:
        path.unlink()
        path.write_text("of another")
        path.chmod(0o600)
        return is_taken(file, path)

    monkeypatch.setattr(run_key, "is_taken", removed)
    with pytest.raises(ConfigError, match="another command leads"), leaders_key(tmp_path, {}):
        pass
    assert (tmp_path / FILE).read_text() == "of another"


def test_where_files_cannot_be_locked_a_key_that_is_there_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(file: int, path: Path) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_key, "is_taken", refused)
    (tmp_path / FILE).write_text("of a leader that was killed")
    with leaders_key(tmp_path, {}) as key:
        assert nodes_key(tmp_path, {}) == key
    assert not (tmp_path / FILE).exists()
