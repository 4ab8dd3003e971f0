"""The batches of a run that are open: their prompts are drawn, and no step has trained on them yet."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from plait.data.records import Prompt
from plait.runtime.folder.moments import Standing
from plait.runtime.inputs.feed import Feed
from plait.runtime.steps.drawn import DrawnBatch
from plait.runtime.steps.step import StepState
from plait.schedule.dispatch import Key


class Batches:
    """Opens batches in their order, and keeps those that are drawn ahead until their step.

    Args:
        feed: behind the prompts of the batches that are `kept`.
        per_step: prompts of a batch.
        kept: drawn before, by an earlier stay of the run.
    """

    def __init__(self, feed: Feed, per_step: int, kept: Collection[StepState] = ()) -> None:
        self._feed = feed
        self._per_step = per_step
        self._open = {state.step: state for state in kept}
        self.whole = tuple(map(DrawnBatch.of, kept))
        """The batches that were drawn when a step ended last: what a checkpoint keeps."""

    @property
    def done(self) -> frozenset[Key]:
        """The rollouts whose samples are all there, and what has scored these already."""
        return frozenset(
            (step, node) for step, state in self._open.items() for node in (*state.generated, *state.scored)
        )

    @property
    def standing(self) -> Standing:
        """Where the samples of open batches stand that have not ended."""
        lengths: dict[int, dict[int, int]] = {}
        for state in self._open.values():
            for node, growing in state.growing.items():
                if node not in state.generated:
                    begun = state.begun.get(node, {})
                    for uid, index in growing.unfinished:
                        tokens = begun[uid, index].num_tokens if (uid, index) in begun else 0
                        lengths.setdefault(uid, {})[index] = tokens
        return lengths

    def at(self, step: int) -> StepState:
        """The batch that `step` trains on; one that was not open gets the next prompts of the run."""
        if step not in self._open:
            self._open[step] = state = StepState(step, given=self._feed.given(step))
            state.prompts = self.draw(state, self._per_step)
        return self._open[step]

    def draw(self, state: StepState, count: int) -> Sequence[Prompt]:
        """Further prompts of the run, for this batch."""
        prompts = self._feed.draw(count)
        state.drawn = self._feed.drawn
        return prompts

    def end(self, step: int) -> None:
        """The batch has been trained on."""
        del self._open[step]
        self.whole = tuple(DrawnBatch.of(state) for state in self._open.values())
