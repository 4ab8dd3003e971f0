"""The most that a process has held, counted from when that was asked for."""

from __future__ import annotations

import mmap
import os

import pytest

from plait.workers.peak_memory import forget_peak, peak_bytes


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="a system that counts no peaks")
def test_the_peak_stays_until_it_is_forgotten() -> None:
    size, near = 64 << 20, 8 << 20  # the kernel counts in batches of pages
    forget_peak()
    before, _ = peak_bytes()
    block = mmap.mmap(-1, size)  # what the allocator has kept would hold no more
    block.write(b"1" * size)
    held, _ = peak_bytes()
    assert held >= before + size - near
    block.close()
    assert peak_bytes()[0] >= held - near, "it is given back, and was held"
    forget_peak()
    assert peak_bytes()[0] <= held - size // 2
