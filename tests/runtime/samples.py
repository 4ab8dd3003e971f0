"""Small samples and batches, for tests of what keeps, counts or sends them."""

from __future__ import annotations

from collections.abc import Sequence

from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import Rows
from plait.runtime.steps.partial_rollout import PartialRollout
from plait.runtime.steps.step import StepState


def prompt(uid: int) -> Prompt:
    """Of `uid` % 3 + 1 tokens."""
    return Prompt(uid, f"prompt {uid}", tuple(range(1, uid % 3 + 2)))


def sample(uid: int, index: int, token_ids: Sequence[int] = (4, 5), reason: FinishReason = FinishReason.STOP) -> Sample:
    """The log-prob of each token is −1 / 3 of its id."""
    return Sample(prompt(uid), index, tuple(token_ids), tuple(-token / 3 for token in token_ids), "text", reason, 2)


def whole_batch(step: int, node: int, *uids: int) -> StepState:
    """A batch whose rollout has ended, two samples to a prompt."""
    state = StepState(step, prompts=tuple(map(prompt, uids)), drawn=7)
    rows = Rows(tuple(sample(uid, index) for uid in uids for index in range(2)))
    state.begin_table(node, rows)
    state.generated[node] = rows
    return state


def halted_batch(step: int, node: int) -> StepState:
    """Of prompts 8 and 9 sample 8.1 has ended, 9.0 was halted after three tokens, 8.0 and 9.1 have said nothing."""
    state = StepState(step, prompts=(prompt(8), prompt(9)), drawn=9)
    state.growing[node] = PartialRollout(state.prompts, 2)
    state.growing[node].take(sample(8, 1))
    state.begun[node] = {(9, 0): sample(9, 0, (6, 7, 8), FinishReason.OPEN)}
    return state
