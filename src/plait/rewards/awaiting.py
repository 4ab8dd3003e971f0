"""Awaits what coroutine functions return, in the one event loop of a reward worker. Standard library only."""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncio import Runner


async def settled_together(results: list[Any]) -> list[Any]:
    """The results, those of coroutine functions awaited together; where one fails, the others are ended."""
    import asyncio  # slow to import, and workers must start in a blink

    tasks = [asyncio.ensure_future(result) for result in results if inspect.isawaitable(result)]
    try:
        waited = iter(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [next(waited) if inspect.isawaitable(result) else result for result in results]


def settled(results: list[Any]) -> list[Any]:
    """`settled_together`, in the event loop of this process."""
    if not any(inspect.isawaitable(result) for result in results):
        return results
    runner = event_loop()
    try:
        return runner.run(settled_together(results))
    except Exception:
        raise
    except BaseException:  # it has left the loop before the coroutines have ended: `sys.exit`
        event_loop.cache_clear()
        runner.close()
        raise


@cache
def event_loop() -> Runner:
    """One event loop for all calls of this process: what a function keeps from call to call, such as a client of a
    service or a semaphore, works in the loop alone that it was first used in."""
    import asyncio

    return asyncio.Runner()
