"""The batches of a run that are open: their prompts are drawn, and no step has trained on them yet."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from operator import attrgetter

from plait.data.records import Prompt
from plait.runtime.folder.moments import Round, Standing
from plait.runtime.inputs.feed import Feed
from plait.runtime.steps.drawn import DrawnBatch
from plait.runtime.steps.step import StepState
from plait.schedule.dispatch import Key


class Batches:
    """Opens batches in their order, and keeps those that are generated ahead until their step.

    Args:
        feed: behind the prompts of the batches that are `kept`.
        per_step: prompts of a batch.
        kept: drawn before, by an earlier stay of the run.
    """

    def __init__(self, feed: Feed, per_step: int, kept: Collection[StepState] = ()) -> None:
        self._feed = feed
        self._per_step = per_step
        self._open = {state.step: state for state in kept}
        self._begun: list[Round] = []
        """Further rounds that the step under way has begun."""
        self.rounds: tuple[Round, ...] = ()
        """Those that the step had begun which ended last, by uid."""
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

    def asked(self, key: Key) -> bool:
        """Whether a reward model has scored all samples of a batch for a call, before the call begins: as they were
        drawn."""
        state = self._open.get(key[0])
        return state is not None and key[1] in state.model_scores

    def at(self, step: int) -> StepState:
        """The batch that `step` trains on; one that was not open gets the next prompts of the run."""
        if step not in self._open:
            prompts = self._feed.draw(self._per_step)
            self._open[step] = StepState(step, prompts, self._feed.drawn, self._feed.given(step))
        return self._open[step]

    def draw(
        self, state: StepState, count: int, record: Collection[Round] | None, *, is_later: bool
    ) -> Sequence[Prompt] | None:
        """The prompts of a further round of a batch; None: it begins in a later step.

        Args:
            count: how many, unless the round is on record.
            record: the rounds of this step in an earlier stay of the run, which are begun again; None: there was none.
            is_later: whether a later step trains on the batch. Otherwise it gets a round more than is on record, where
                what was drawn is worth less than it was then.
        """
        begins = Round(state.step, self._feed.drawn, count)
        if record is not None:
            begun = sum(earlier.batch == state.step for earlier in self._begun)
            recorded = sorted((one for one in record if one.batch == state.step), key=attrgetter("uid"))
            if begun >= len(recorded) and is_later:
                return None
            behind = max(chain([begins.uid], (one.uid + self._count(one) for one in record)))
            begins = recorded[begun] if begun < len(recorded) else begins._replace(uid=behind)
        self._begun.append(begins)
        count = self._count(begins)
        for later in self._open.values():
            later.drawn += count if later.step >= state.step else 0
        return self._feed.draw(count, begins.uid)

    def _count(self, begun: Round) -> int:
        return self._per_step if begun.num_prompts is None else begun.num_prompts

    def end(self, step: int) -> None:
        """The batch has been trained on."""
        del self._open[step]
        self.rounds, self._begun = tuple(sorted(self._begun, key=attrgetter("uid"))), []
        self.whole = tuple(DrawnBatch.of(state) for state in self._open.values())
