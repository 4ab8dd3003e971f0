"""One process per rank on this machine."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.launch.interface import START_DEADLINE_S
from plait.launch.local_group import LocalGroup
from plait.launch.process import WorkerProcess
from plait.launch.stall import Stillness
from plait.launch.wire import KEY_BYTES, Start, pickled_arguments
from plait.launch.worker import SCRIPT_MODULE

_BEATS_PER_FREEZE = 6
_LONGEST_BEAT_S = 1.0


class LocalProcesses:
    """Launches a clean interpreter per rank.

    Args:
        threads: of OpenMP and the BLAS libraries in each process.
        output_dir: gets the stdout and stderr of rank R, appended to `rankR.log`; None keeps only what errors quote.
        freeze_after_s: silence after which a rank counts as frozen; more than any action holds the interpreter lock.
        environment: further variables of the processes.
        doing: says what each rank does within its action, for the error of a rank that died or froze.
        progress: a number of each rank that changes with all that it does.
        stalled_after_s: a rank whose number stays as it is for so long, and which waits for no rank whose number
            changes, counts as stalled; 0: none does.
    """

    def __init__(
        self,
        *,
        threads: int = 1,
        output_dir: Path | None = None,
        freeze_after_s: float = 30.0,
        environment: Mapping[str, str] | None = None,
        doing: Callable[[], Sequence[str]] = tuple,
        progress: Callable[[], Sequence[int]] = tuple,
        stalled_after_s: float = 0.0,
    ) -> None:
        assert threads >= 1, f"threads must be at least 1, got {threads}"
        assert freeze_after_s > 0, f"freeze_after_s must be positive, got {freeze_after_s}"
        loopback = "lo" if sys.platform == "linux" else "lo0"
        self._output_dir = output_dir
        self._freeze_after_s = freeze_after_s
        self._doing = doing
        self._progress = progress
        self._stalled_after_s = stalled_after_s
        self._environment = {
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads)),
            **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback),
            "PYTHONHASHSEED": "0",  # a set has the same order on each rank
            **(environment or {}),
        }

    def start(
        self,
        worker: Callable[..., Any],
        num_ranks: int,
        *,
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
        deadline_s: float = START_DEADLINE_S,
    ) -> LocalGroup:
        """See `Launcher.start`."""
        assert num_ranks >= 1, f"a group has at least one rank, asked for {num_ranks}"
        main_file, main_module = _controllers_main()
        pickled = pickled_arguments((worker, *arguments), dict(options or {}))
        key = secrets.token_bytes(KEY_BYTES)
        if self._output_dir is not None:
            self._output_dir.mkdir(parents=True, exist_ok=True)
        processes: list[WorkerProcess] = []
        try:
            for rank in range(num_ranks):
                output = self._output_dir / f"rank{rank}.log" if self._output_dir is not None else None
                processes.append(WorkerProcess(key, self._environment, output))
        except BaseException:
            for process in processes:
                process.kill()
            raise
        beat_s = min(_LONGEST_BEAT_S, self._freeze_after_s / _BEATS_PER_FREEZE)
        starts = [Start(pickled, main_file, main_module, rank, num_ranks, beat_s) for rank in range(num_ranks)]
        limit_s = self._stalled_after_s
        stillness = Stillness(num_ranks, self._progress, limit_s) if limit_s > 0 else None
        group = LocalGroup(processes, key, self._freeze_after_s, self._doing, stillness)
        try:
            group.construct(starts, deadline_s)
        except BaseException:
            group.close(grace_s=0.0)
            raise
        return group


def _controllers_main() -> tuple[str | None, str | None]:
    """(file, module name if it was started by that) of the script that runs, where workers find what it defines."""
    main = sys.modules["__main__"]
    sys.modules.setdefault(SCRIPT_MODULE, main)  # for what the workers send back
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    path = os.path.abspath(file) if isinstance(file, str) and os.path.isfile(file) else None
    return path, spec.name if spec is not None else None
