"""A run that goes on by itself after ranks were lost: from its last checkpoint, on what is left, so often as it may.

Only what was lost without being wrong is begun again: a process that died, froze or stalled, or a node. What raises is
an error of the input, of the user's code or of ours, and comes again; so does a loss that repeats itself: the same end
in the same action of the same ranks, with no step saved in between.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from plait.checkpoint.store import CheckpointStore
from plait.errors import RunError, UserError
from plait.launch.failures import Failure
from plait.launch.machine import visible_devices
from plait.launch.nodes.gathered import Gathered
from plait.observe.screen import say
from plait.runtime.folder.directory import RunDirectory
from plait.runtime.folder.history import Origin, Restart
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.processes.left_places import PreparedFor, fitted

if TYPE_CHECKING:
    from plait.runtime.controller import Outcome


class RanksLost(RunError):
    """Ranks are gone, not wrong: the run can go on from its last checkpoint.

    Args:
        what: happened.
        how_to_resume: how the run can be resumed, in words.
        failure: of the rank that was the first; None: a node was lost before it had begun.
    """

    def __init__(self, what: str, how_to_resume: str, failure: Failure | None = None) -> None:
        super().__init__(f"{what}\n{how_to_resume}")
        self.what = what
        self.how_to_resume = how_to_resume
        self.failure = failure


class Supervise(Protocol):
    """`supervisor.supervise` of a directory, flow and nodes: runs a plan to its end."""

    def __call__(self, prepared: Prepared, *, resume: bool, origin: Origin) -> Outcome: ...


def supervised(
    supervise: Supervise,
    prepared: Prepared,
    directory: RunDirectory,
    prepared_for: PreparedFor,
    *,
    resume: bool,
    origin: Origin,
    nodes: Gathered | None = None,
) -> Outcome:
    """Run a plan, and again after a loss, as often as `restarts` of the recipe says.

    Args:
        prepared_for: resolves another recipe of the run, for the nodes that are left.

    Raises:
        RanksLost: nothing is left, no plan fits what is, the loss came again, or the restarts are used up. The first
            error stands first in it.
        UserError, RunError, KeyboardInterrupt: as `supervise`.
    """
    restarts = Restarts(prepared.recipe.restarts)
    while True:
        places = _places(nodes)
        try:
            return supervise(prepared, resume=resume, origin=origin)
        except RanksLost as lost:
            if nodes is not None:
                nodes.drop_lost()
            # To see that a checkpoint is whole takes minutes of a large model's: once, and only for another start.
            saved = _saved(directory) if restarts.are_left and directory.begun else 0
            restarts.count(lost, saved, _places(nodes))
            prepared = _on_what_is_left(prepared, prepared_for, lost, places, nodes)
            resume = directory.begun
            number, most = restarts.done, restarts.most
            origin = replace(origin, restart=Restart(number, most, lost.what))
            text = _told(number, most, saved, prepared)
            say(f"error: {lost.what}\n{text}", file=sys.stderr)
            if nodes is not None:
                nodes.tell(f"node 0: {lost.what.splitlines()[0]}\n{text}")


class Restarts:
    """Counts the losses of a run, and says which is the last.

    Args:
        most: losses after which the run goes on.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.done = 0
        self._first: RanksLost | None = None
        self._last: tuple[object, ...] = ()

    @property
    def are_left(self) -> bool:
        """Whether the run may go on after another loss."""
        return self.done < self.most

    def count(self, lost: RanksLost, saved: int, places: int) -> None:
        """Take a loss after which the run is to go on.

        Args:
            saved: newest step that has a checkpoint; 0: none has.
            places: where ranks can still be.

        Raises:
            RanksLost: it is not to go on.
        """
        first = self._first = self._first or lost
        failure = lost.failure
        last = (saved, places, *(() if failure is None else (failure.ended, failure.rank, failure.action)))
        came_again, self._last = last == self._last, last
        why = ""
        if places == 0:
            why = "no node is left"
        elif not self.are_left:
            why = f"`restarts` is {self.most}" if self.most else ""
        elif came_again:
            why = "the same came again, with no step saved in between"
        else:
            self.done += 1
            return
        if not why:
            raise lost
        raise RanksLost(_both(first, lost, self.done), f"{lost.how_to_resume}\nnot restarted again: {why}", failure)


def _both(first: RanksLost, last: RanksLost, restarts: int) -> str:
    if first is last:
        return first.what
    times = "once" if restarts == 1 else f"{restarts} times"
    return f"{first.what}\nthis was the first error; the run was restarted {times}, and then: {last.what}"


def _on_what_is_left(
    prepared: Prepared,
    prepared_for: PreparedFor,
    lost: RanksLost,
    places: int,
    nodes: Gathered | None,
) -> Prepared:
    """The run on the places that are left, by the plan that its recipe names if that fits there, else by one that is
    found. Raises RanksLost where none fits."""
    recipe, had = prepared.recipe, prepared.plan.num_ranks
    num_left = had // places * _places(nodes)
    if nodes is None and recipe.device == "cuda" and 0 < visible_devices() < had:
        num_left = visible_devices()
    if num_left == had:
        return prepared
    try:
        return fitted(recipe, num_left, prepared_for)
    except UserError as why:
        how_to_resume = f"{lost.how_to_resume}\nnot restarted: on what is left no plan fits: {why}"
        raise RanksLost(lost.what, how_to_resume, lost.failure) from why


def _told(number: int, most: int, saved: int, prepared: Prepared) -> str:
    plan = prepared.plan
    ranks = f"{plan.num_ranks} rank{'s' * (plan.num_ranks > 1)}"
    where = f"{ranks} of {plan.nodes} node{'s' * (plan.nodes > 1)}, plan {plan.name}"
    begins = f"the checkpoint of step {saved}" if saved else "the beginning: no step is saved"
    return f"restart {number} of {most}: the run goes on from {begins}, on {where}"


def _places(nodes: Gathered | None) -> int:
    return 1 if nodes is None else len(nodes.nodes)


def _saved(directory: RunDirectory) -> int:
    """Step of the newest checkpoint that is whole; 0: there is none."""
    try:
        checkpoint = CheckpointStore(directory.files.checkpoints, keep_last=1).latest()
    except RunError:
        return 0
    return 0 if checkpoint is None else checkpoint.step
