"""A run on one device: a group of one rank, in this process, which nobody follows."""

from __future__ import annotations

from contextlib import nullcontext

from plait.observe.progress import Progress
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.step_metrics import watched
from plait.runtime.workers import Workers
from plait.workers.announcer import Announcer
from plait.workers.rank_state import Setting
from plait.workers.ranks import LEADER
from plait.workers.recorder import Recorder
from plait.workers.role_builder import make_rank_state
from plait.workers.status_file import StatusFile
from plait.workers.transport import Transport
from plait.workers.worker_group import WorkerGroup


class Alone:
    """`workers.Leading` of this process."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared

    def progress(self) -> Progress:
        of = self._prepared
        return Progress(of.recipe.steps, watched=tuple(watched(of.flow, of.models, of.held_out)))

    def workers(self, recorder: Recorder, *, loads: bool = False) -> Workers:
        of, waits = self._prepared, lambda what: nullcontext()
        setting = Setting(of.recipe, of.flow, of.models, of.plan, LEADER, waits, loads=loads)
        rank_state = make_rank_state(setting)
        announcer = Announcer(rank_state, Transport(None, LEADER, ()), recorder, StatusFile(None, LEADER))
        return WorkerGroup(announcer, 1)
