"""How this process computes, and how much memory it holds."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

import psutil
import torch

from plait.cost.machine import threads_alone
from plait.errors import ConfigError
from plait.kept_memory import give_back_freed
from plait.workers.peak_memory import forget_peak

LARGE_BYTES = 1 << 30
"""What a process holds at least, of which it is worth half a second to look for memory of runs that have ended."""
_running: list[int] = []
"""The process that a run computes in, while it does; a child that it forks is another one."""
_entering = threading.Lock()


@contextlib.contextmanager
def as_in_new_process(threads: int) -> Iterator[None]:
    """While inside, one run computes here, as in a new process, whatever this one has asked of torch: in a notebook
    gradients may be off, numbers bfloat16 by default, or autocast on.

    Args:
        threads: see `threads_alone`.

    Raises:
        ConfigError: another run computes in this process.
    """
    with _entering:
        if os.getpid() in _running:
            raise ConfigError(
                "another run goes on in this process (in another thread), and two would change each other's numbers: "
                "wait for it, or begin each in a process of its own"
            )
        _running[:] = [os.getpid()]
    threads_before = torch.get_num_threads()
    try:
        free_ended_runs()
        set_up(threads)
        with _torch_as_it_begins():
            yield
    finally:
        torch.set_num_threads(threads_before)
        _running.clear()
    free_ended_runs()


def free_ended_runs() -> None:
    """Give back what ended runs have held: a model holds itself, by its layers whose forward is ours, and Python looks
    for such circles so seldom that two runs were in memory at once."""
    if resident_bytes() > LARGE_BYTES:
        gc.collect()
        give_back_freed()


@contextlib.contextmanager
def _torch_as_it_begins() -> Iterator[None]:
    """While inside; behind it all is as it was."""
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":  # a device that is set costs every call of torch time
            stack.enter_context(torch.device("cpu"))
        yield


def set_up(threads: int) -> None:
    """Fix the number of compute threads: the same number gives the same bits. What the process holds at most counts
    from now on.

    Args:
        threads: see `threads_alone`.
    """
    # Transformers reads a checkpoint with threads, whose allocators keep what they free where `give_back_freed` cannot
    # reach it: 80 MB of SmolLM2-135M in bfloat16.
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
    torch.set_num_threads(threads_alone(threads))
    forget_peak()


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    return int(psutil.Process().memory_info().rss)
