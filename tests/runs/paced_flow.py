"""A flow whose instances wait for each other at the end of a rollout, so that each has samples when few are left: how
fast their processes are on a busy machine decides nothing.

With LEFT samples an instance goes on when it is told to have some move; the leader's also where all others have come
as far. Steps in which nothing would be gathered then must not be among those that are paced: they would not end.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection
from pathlib import Path

LEFT = 3
"""Samples of an instance: two have as many as the least share of a test's 24 that is gathered."""
FLOW = f"""
    import sys
    import time

    from plait.algorithms.grpo import grpo as grpo
    from plait.workers.lockstep_engine import LockstepEngine
    from plait.workers.remote_engine import RemoteEngine
    from plait.workers.call_messages import Generate, Migrate

    paced = {{int(word) for word in __file__.rpartition("-")[2].removesuffix(".py").split("_")}}
    advances, hears, steps = RemoteEngine.advance, LockstepEngine.hear, LockstepEngine.step

    def advance(self, call):
        if self._own is not None:
            self._own.others = [count for place, count in enumerate(self.running) if place != self._own_place]
        return advances(self, call)

    def hear(self, number, word):
        if isinstance(word, Generate | Migrate):
            self.moves = isinstance(word, Migrate)
        hears(self, number, word)

    def step(self, read):
        engine, others = self._engine, getattr(self, "others", None)
        has_few = not engine.state.flight.pending and 0 < len(engine.said) <= {LEFT}
        is_ahead = others is None or max(others) > {LEFT}
        if self.decides and engine.policy_version in paced and has_few and is_ahead and not self.moves:
            self.last_step = self._moved = None
            time.sleep(0.002)
            return []
        return steps(self, read)

    if "pytest" not in sys.modules:
        RemoteEngine.advance, LockstepEngine.hear, LockstepEngine.step = advance, hear, step
"""


def paced(folder: Path, steps: Collection[int]) -> str:
    """The key `algorithm` of runs in which these steps, counted from 1, are paced."""
    path = folder / f"flow-{'_'.join(str(step - 1) for step in steps)}.py"
    path.write_text(textwrap.dedent(FLOW))
    return f"{path}:grpo"
