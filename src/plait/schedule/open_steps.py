"""Which calls run in a step, if samples may be older than the weights that train on them (`max_staleness`).

A step scores and trains one batch. It also draws the samples of the next `most` batches, and asks roles whose scores do
not change (a reference) for them as soon as they are drawn; what is drawn of prompts that are made of these samples it
draws for its own batch alone. With `most` = 0 a step draws its own batch and nothing
else. When a step ends, none of its calls is under way, so the new weights can be published: engines have one version at
a time.

By default the rollouts of later batches end with the step that began them. With `beside` they halt when the step ends,
and their unfinished samples go on in the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from plait.dataflow import CallKind, Dataflow, Node
from plait.schedule.dispatch import Key


@dataclass(frozen=True)
class OpenSteps:
    """What a step of a run draws, scores and trains, and which calls must end before which.

    Args:
        before: node → the nodes of the same batch that must end before it (`schedule.needs`).
        most: versions of the weights between those that draw a sample and the update that uses it, at most.
        steps: of the run; no samples are drawn for steps after the last.
        apart: whether a GENERATE call has its own copy of the weights, which training does not change.
        early: nodes that score a batch when it is drawn, if rollouts end with their step (`needs.early_scores`).
        beside: None: rollouts of later batches end with the step. Otherwise they halt with it, and `beside` says
            whether a GENERATE call may go on beside all calls of the step, or only beside the step's own rollouts;
            where these have been drawn, it then waits until its ranks are free, as any call does.
    """

    flow: Dataflow
    before: Mapping[int, frozenset[int]]
    most: int = 0
    steps: int = 1
    apart: Callable[[Node], bool] = lambda node: False
    beside: Callable[[Node], bool] | None = None
    early: frozenset[int] = frozenset()

    def ahead(self, step: int) -> range:
        """The batches of later steps that may be drawn during `step`."""
        return range(step + 1, min(step + self.most, self.steps - 1) + 1)

    def calls(self, step: int, done: Collection[Key]) -> list[Key]:
        """All calls that run in a step: its own, then those of later batches.

        Args:
            done: rollouts whose samples are all drawn, and calls that have scored these; they are left out.
        """
        own = [(step, node.id) for node in self.flow.nodes]
        early = self.early if self.beside is None else frozenset[int]()
        drawn = self.flow.of_step_prompts
        nodes = [node.id for node in self.flow.nodes if node in drawn or node.id in early]
        later = [(batch, node) for batch in self.ahead(step) for node in nodes]
        return [key for key in own + later if key not in done]

    def until(self, step: int, own: Collection[Key]) -> frozenset[Key]:
        """The calls with whose end the rollouts of later batches end or halt: all of the step's `own` calls, or only
        its rollouts. If these were drawn in an earlier step, the set is empty, and rollouts of later batches do not go
        on.
        """
        if self.beside is None or all(self.beside(node) for node in self._rollouts):
            return frozenset(own)
        return frozenset(key for key in own if self.flow.nodes[key[1]].kind is CallKind.GENERATE)

    def halts(self, step: int, key: Key) -> bool:
        """Whether a call is a rollout of a later batch that halts with the step."""
        return self.beside is not None and key[0] > step

    def needs(self, step: int, key: Key) -> frozenset[Key]:
        """The calls that must have ended before one of `calls(step)` begins.

        Rollouts that end with the step draw in the order of their batches. If generation uses the weights that are
        trained, training begins when all rollouts of the step have ended: so all samples are of the version that the
        step begins with.
        """
        batch, node = key[0], self.flow.nodes[key[1]]
        needed = {(batch, earlier) for earlier in self.before[node.id]}
        if node.kind is CallKind.GENERATE and self.beside is None:
            needed |= {(other, rollout.id) for other in range(step, batch) for rollout in self._rollouts}
        if node.kind is CallKind.TRAIN:
            shared = [rollout for rollout in self._rollouts if rollout.role == node.role and not self.apart(rollout)]
            needed |= {(other, rollout.id) for other in self.ahead(step) for rollout in shared}
        return frozenset(needed)

    @property
    def _rollouts(self) -> tuple[Node, ...]:
        return self.flow.of_kind(CallKind.GENERATE)
