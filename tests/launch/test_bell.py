"""A bell wakes who waits on it beside connections."""

from __future__ import annotations

import selectors
import threading
from multiprocessing import connection

from plait.launch.bell import Bell


def rings(bell: Bell) -> bool:
    return bool(connection.wait([bell], 0))


def test_it_rings_until_it_is_hushed() -> None:
    bell = Bell()
    assert not rings(bell)
    bell.ring()
    bell.ring()
    assert rings(bell)
    assert rings(bell)
    bell.hush()
    assert not rings(bell)
    bell.hush()
    bell.ring()
    assert rings(bell)
    bell.close()


def test_any_number_of_rings_blocks_nobody_and_one_hush_ends_them() -> None:
    bell = Bell()
    for _ in range(100_000):
        bell.ring()
    bell.hush()
    assert not rings(bell)
    bell.close()


def test_another_thread_ends_a_selectors_wait() -> None:
    bell = Bell()
    with selectors.DefaultSelector() as selector:
        selector.register(bell, selectors.EVENT_READ)
        thread = threading.Thread(target=bell.ring)
        thread.start()
        (event,) = selector.select(30.0)
        thread.join()
        assert event[0].fileobj is bell
    bell.close()


def test_one_that_is_closed_is_rung_by_nobody() -> None:
    bell = Bell()
    bell.close()
    bell.ring()
