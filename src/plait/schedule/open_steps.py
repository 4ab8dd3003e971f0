"""Which calls of which steps run beside each other, where samples may be older than the weights that train on them.

A step scores and trains one batch, and draws the samples of the batches behind it that may be drawn by now: of as many
as versions may lie between. What says the same of samples in any step (a reference) is asked as soon as they are drawn.
With none between, a step draws its own batch, and nothing else. Nothing of a step is under way when it has ended, so
what generates has one version of the weights at a time, and that is published then.

Rollouts of later batches end with the step that began them (they are waited for), or they halt with it: what is
unfinished then goes on in the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from plait.dataflow import CallKind, Dataflow, Node
from plait.schedule.dispatch import Key


@dataclass(frozen=True)
class OpenSteps:
    """What a step of a run draws, scores and trains, and in which order its calls may run.

    Args:
        before: `schedule.needs` of the flow.
        most: versions that may lie between the weights that draw a sample and the update that uses it.
        steps: of the run; no samples are drawn for steps behind the last.
        apart: whether a GENERATE call computes with weights of its own, that training leaves as they are.
        early: calls that score a batch when it is drawn, where rollouts are waited for (`needs.early_scores`).
        beside: None: rollouts are waited for. Else those of later batches halt, and it says whether a GENERATE call may
            go on beside the other calls of a step, or beside its rollouts only.
    """

    flow: Dataflow
    before: Mapping[int, frozenset[int]]
    most: int = 0
    steps: int = 1
    apart: Callable[[Node], bool] = lambda node: False
    beside: Callable[[Node], bool] | None = None
    early: frozenset[int] = frozenset()

    def ahead(self, step: int) -> range:
        """The batches that may be drawn while `step` is done, and that later steps train on."""
        return range(step + 1, min(step + self.most, self.steps - 1) + 1)

    def calls(self, step: int, done: Collection[Key]) -> list[Key]:
        """All calls that run in a step: its own, then those of batches ahead.

        Args:
            done: rollouts whose samples are all there, and what has scored these already.
        """
        own = [(step, node.id) for node in self.flow.nodes]
        early = self.early if self.beside is None else frozenset[int]()
        nodes = [node.id for node in self.flow.nodes if node.kind is CallKind.GENERATE or node.id in early]
        later = [(batch, node) for batch in self.ahead(step) for node in nodes]
        return [key for key in own + later if key not in done]

    def until(self, step: int, own: Collection[Key]) -> frozenset[Key]:
        """Those of the own calls of a step with whose end rollouts ahead end or halt: all, or its rollouts; none where
        these are drawn, so that rollouts ahead stand where they are.
        """
        if self.beside is None or all(self.beside(node) for node in self._rollouts):
            return frozenset(own)
        return frozenset(key for key in own if self.flow.nodes[key[1]].kind is CallKind.GENERATE)

    def halts(self, step: int, key: Key) -> bool:
        """Whether a call is a rollout that halts with the step."""
        return self.beside is not None and key[0] > step

    def needs(self, step: int, key: Key) -> frozenset[Key]:
        """The calls that must have ended before one of `calls(step)` begins.

        Rollouts that are waited for draw prompts in the order of their batches. Where what generates computes with the
        weights that are trained, they are trained when all rollouts of the step have ended: so its samples are of the
        version that the step begins with, whatever the clock.
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
