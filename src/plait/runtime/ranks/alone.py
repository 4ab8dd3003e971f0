"""A run on one device: a group of one rank, in this process, which nobody follows."""

from __future__ import annotations

from contextlib import nullcontext

from plait.observe.progress import Progress
from plait.runtime.prepare import Prepared
from plait.runtime.ranks.announcer import Announcer
from plait.runtime.ranks.board import Board
from plait.runtime.ranks.commands import LEADER
from plait.runtime.ranks.crew import Crew
from plait.runtime.ranks.mail import Mail
from plait.runtime.ranks.parts import Parts
from plait.runtime.recorder import Recorder
from plait.runtime.session import watched


class Alone:
    """`session.Leading` of this process."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared

    def progress(self) -> Progress:
        return Progress(self._prepared.recipe.steps, watched=watched(self._prepared))

    def crew(self, recorder: Recorder) -> Crew:
        of = self._prepared
        parts = Parts(of.recipe, of.flow, of.models, of.plan, LEADER, waiting_for=lambda what: nullcontext())
        return Crew(Announcer(parts, Mail(None, LEADER, ()), recorder, Board(None, LEADER)), 1)
