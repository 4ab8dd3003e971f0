"""Servers that fail; without torch, so that they start in no time."""

from __future__ import annotations

import os
import time
from typing import Any


class Unready:
    def __init__(self, context: Any, loading: Any) -> None:
        raise ValueError(f"no such architecture in {loading.dtype}")


class Faulty:
    """Fails at its first step, as `PLAIT_TEST_FAULT` says."""

    def __init__(self, context: Any, loading: Any) -> None:
        pass

    def step(self, wanted: Any) -> None:
        print("the last words of the engine", flush=True)
        match os.environ["PLAIT_TEST_FAULT"]:
            case "dies":
                os.kill(os.getpid(), 9)
            case "raises":
                raise MemoryError("no block is left")
            case "hangs":
                time.sleep(60.0)
