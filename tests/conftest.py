"""Random examples have no time limit: how long one takes says how busy the machine is. One thread, for tiny tensors.
Without a GPU triton's kernels are interpreted. The user's profiles are neither read nor written."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from typing import Any

from tests import warm

# Before torch is imported: two threads on a busy machine are many times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads of tokenizers stay, and a process that has threads cannot be forked (`warm`).
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before triton is imported: it looks at this where a kernel is defined, its own among them.
if not warm.HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings

from tests import disk, quick
from tests.own_cache import OwnCache


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    with quick.refused_processes(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is imported and collected stays to the end: a tenth of collecting would be looking for what does not."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*warm.GARBAGE)
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Of slow tests nothing is made where they would be left out: they are as many as the others."""
    return [] if _leaves_slow_out(collector.config) and _has_slow(getattr(obj, "pytestmark", ())) else None


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The same of slow cases. What is left has the names that it has among all.

    No name has an address in it, which is another in each of the processes that collect tests."""
    calls = vars(metafunc)["_calls"]  # pytest has no other way to them
    if addressed := [call.id for call in calls if " at 0x" in call.id]:
        raise pytest.UsageError(f"{metafunc.function.__name__}: give cases `ids` without an address: {addressed[0]}")
    if _leaves_slow_out(metafunc.config):
        calls[:] = [call for call in calls if not _has_slow(call.marks)] or calls


def _leaves_slow_out(config: pytest.Config) -> bool:
    return config.option.markexpr in ("not slow", "not slow and not process")  # of the Makefile


def _has_slow(marks: Any) -> bool:
    return isinstance(marks, list) and any(mark.name == "slow" for mark in marks)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests last: files that take long begin first, and at the end no worker waits long for another."""
    items.sort(key=lambda item: quick.is_quick_file(item.path))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, Any, Any]:
    try:
        return (yield)
    finally:
        CACHE.forget_profiles()


def pytest_configure(config: pytest.Config) -> None:
    _SESSIONS.append(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """A test may run others (`planted`): the cache is gone behind the last of all."""
    _SESSIONS.remove(config)
    if not _SESSIONS:
        CACHE.remove()


_SESSIONS: list[pytest.Config] = []
CACHE = OwnCache()
quick.install()
warm.install()
disk.install()

# `make test` tries the same examples each time; `make test-all` tries new ones, three times as many.
settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=33)
settings.register_profile("random", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
