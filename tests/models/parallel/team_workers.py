"""Workers for the tests of teams and partial models: each runs in a process of its own."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
import torch.distributed as dist

from plait.layout.mesh import Layout
from plait.models.parallel.team import Team, make_teams


class TeamWorker:
    """Runs functions of test modules: `run("tests.models.parallel.test_team", "reduced", layouts, ...)` calls
    `reduced(worker, ...)`."""

    def __init__(self, context: Any) -> None:
        warnings.filterwarnings("ignore", category=FutureWarning)
        torch.set_num_threads(1)
        self.context = context
        self.rank = context.rank
        self._teams: dict[tuple[Layout, float], Team | None] = {}
        dist.init_process_group("gloo", store=context.store(), rank=context.rank, world_size=context.num_ranks)

    def run(self, module: str, function: str, *arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module), function)(self, *arguments, **options)

    def team_of(self, layout: Layout, timeout_s: float = 60.0) -> Team | None:
        """One per layout; every rank of the group asks for the same."""
        key = (layout, timeout_s)
        if key not in self._teams:
            made = make_teams([layout], self.rank, timeout_s=timeout_s, waiting_for=self.context.waiting_for)
            self._teams[key] = made[layout]
        return self._teams[key]

    def close(self) -> None:
        dist.destroy_process_group()
