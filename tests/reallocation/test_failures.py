"""A peer that is lost in the middle of a move becomes an error at the others, with its cause."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest
from torch.distributed import FileStore

from plait.launch.interface import WorkerContext
from tests.forked import exit_code_of, forked
from tests.reallocation.worker import Worker

DEADLINE_S = 2.0


def _rank(rank: int, size: int, folder: Path, victim: int, signal_number: int) -> None:
    worker = Worker(WorkerContext(rank, size, lambda: FileStore(str(folder / "store"), size)))
    (folder / f"{rank}").write_text(worker.lost_peer(victim, 3, signal_number, DEADLINE_S))


@pytest.mark.parametrize(
    ("size", "victim", "signal_number", "cause"),
    [(4, 2, signal.SIGKILL, r"\S"), (2, 0, signal.SIGSTOP, r"nothing in 2 s")],
    ids=["killed", "frozen"],
)
def test_a_lost_peer(tmp_path: Path, size: int, victim: int, signal_number: int, cause: str) -> None:
    """It is lost after 3 messages. Each of the others says which message it waits for, whose, and how long it is."""
    arguments = (size, tmp_path, victim, signal_number)
    ranks = {rank: forked(lambda rank=rank: _rank(rank, *arguments)) for rank in range(size)}
    try:
        for rank in sorted(ranks.keys() - {victim}):
            assert exit_code_of(ranks[rank]) == 0, f"rank {rank} has failed"
            found = (tmp_path / f"{rank}").read_text()
            expected = (
                rf"RunError: actor\.weights: rank {rank} expected message \d+ of round \d+ "
                rf"\((SEND|RECV), \d+ bytes (to|from) rank \d\) to go through within 2 s, found: {cause}"
            )
            assert re.match(expected, found), found
    finally:
        for pid in ranks.values():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it was waited for above
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
