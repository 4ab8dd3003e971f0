"""Work: what a rank does a small action at a time, so that between any two actions it can do something else.

Scoring, training, generation, moves of weights, checkpoints: each is a generator of this one kind. Each `next()` does
what can be done without waiting for others, and yields the record of it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

COMPUTE = "compute"
LINK = "link"
"""Lane of what moves between devices, and between a device and host memory."""
DISK = "disk"
"""Lane of what is written to checkpoints and read from them."""


@dataclass(frozen=True, slots=True)
class Done:
    """One action that has just run on this rank; an empty `action` is none: it is not recorded."""

    action: str = ""
    """Unique on a rank within a training step, such as `actor.train/b0/mb3`, `actor.train/b0/step`, or, of a pipeline,
    `actor.train/b0/1F3`: the last part is the id that the action has in its schedule. Of a move its name and the place
    of the action in the rank's row, such as `actor.weights/3`."""
    kind: str = ""
    """PREFILL, DECODE, SCORE (a forward), TRAIN (forward and backward), STEP (an optimizer step), SAMPLES (that go on
    in another instance), of a pipeline `action.Kind`, of a move `move_plan.MoveKind` by name, OFFLOAD, ONLOAD."""
    tokens: int = 0
    """Tokens of the packed row that were computed, draft tokens among them; 0 for a STEP."""
    bytes: int = 0
    """A SEND counts those that it sent, any other action those that this rank received: messages, gradients and
    weights in a STEP, of activations under tensor parallelism (`models.parallel.transfer.Traffic`). Of a move those
    that moved, in the dtype of the wire; 0 for a view."""
    lane: str = COMPUTE
    """The resource of the rank that it kept busy."""
    role: str = ""
    """Whose it is, of a work of several roles; empty: the work's."""
    samples: int = 0
    """Samples that the instance runs, in a DECODE; 0 elsewhere."""
    drawn: int = 0
    """Tokens that these got by it: one for each that it computed, and one for each draft token that was accepted."""
    units: int = 1
    """What a progress bar of its call goes on by: actions, or samples."""


MOVED_ON = Done(units=0)
"""Something came, or was said to others: no action of this rank, but it need not wait."""

Work = Generator[Done | None, None, Result]
"""Its `return` is the result. None: nothing can be done until others have done something, and nothing was done."""


def at_once(function: Callable[Arguments, Result]) -> Callable[Arguments, Work[Result]]:
    """A function as a work that does all of it at its first `next()`, without an action that is recorded."""

    @wraps(function)
    def work(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Work[Result]:
        return function(*args, **kwargs)
        yield

    return work


@at_once
def nothing() -> None:
    """A work that has nothing to do."""


def to_the_end(work: Work[Result]) -> Result:
    """Do all of a work that waits for nobody; its result."""
    while True:
        try:
            done = next(work)
        except StopIteration as end:
            return end.value
        assert done is not None, "a work that waits for others is waited with"
