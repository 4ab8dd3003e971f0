"""Where the key of a run over several nodes is, and who may read it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from plait.errors import ConfigError
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
