"""A peer that is lost in the middle of a move becomes an error at the others, with its cause."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest
from torch.distributed import FileStore

from plait.launch.worker_context import Place, WorkerContext
from tests.forked import exit_code_of, forked
from tests.reallocation.worker import Worker


def _rank(rank: int, size: int, folder: Path, victim: int, signal_number: int, deadline_s: float) -> None:
    worker = Worker(WorkerContext(rank, size, lambda: FileStore(str(folder / "store"), size), Place(), print))
    (folder / f"{rank}").write_text(worker.lost_peer(victim, 3, signal_number, deadline_s))


@pytest.mark.parametrize(
    ("size", "victim", "signal_number", "deadline_s", "cause"),
    [(4, 2, signal.SIGKILL, 2.0, r"\S"), (2, 0, signal.SIGSTOP, 1.0, r"nothing in 1 s")],
    ids=["killed", "frozen"],
)
def test_a_lost_peer(tmp_path: Path, size: int, victim: int, signal_number: int, deadline_s: float, cause: str) -> None:
    """It is lost after 3 messages. Each of the others says which message it waits for, whose, and how long it is."""
    arguments = (size, tmp_path, victim, signal_number, deadline_s)
    ranks = {rank: forked(lambda rank=rank: _rank(rank, *arguments)) for rank in range(size)}
    try:
        for rank in sorted(ranks.keys() - {victim}):
            assert exit_code_of(ranks[rank]) == 0, f"rank {rank} has failed"
            found = (tmp_path / f"{rank}").read_text()
            expected = (
                rf"RunError: actor\.weights: rank {rank} expected message \d+ of round \d+ "
                rf"\((SEND|RECV), \d+ bytes (to|from) rank \d\) to go through within {deadline_s:g} s, found: {cause}"
            )
            assert re.match(expected, found), found
    finally:
        for pid in ranks.values():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it was waited for above
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
