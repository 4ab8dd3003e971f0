"""The doctor's look at losses of the user's, once, in the first step that trains by them: do they add up?"""

from __future__ import annotations

from plait.data.rows import trained_rows
from plait.dataflow import CallKind, Dataflow
from plait.runtime.steps.step import StepState
from plait.training.loss_split import split_gap
from plait.training.mini_batch import LossCall
from plait.training.trainer_settings import SampleSettings
from plait.user_code import is_users, title_of


def split_gaps(flow: Dataflow, state: StepState, max_response_tokens: int) -> dict[str, float]:
    """`CALL LOSS` → `split_gap` of each loss of the user's that trained for the first time in this step; plait's own
    losses have tests."""
    gaps: dict[str, float] = {}
    for node in flow.of_kind(CallKind.TRAIN):
        loss = node.fn
        if loss is None or not is_users(loss) or state.step != node.training.after or node.rows not in state.tables:
            continue
        rows = trained_rows(node, state.tables)
        call = LossCall.of(node, batch_values=state.batch, temperature=1.0)
        samples = SampleSettings(1.0, max_response_tokens)
        gap = split_gap(rows, call, str(node.role), samples)
        if gap is not None:
            gaps[f"{node.call} {title_of(loss)}"] = gap
    return gaps
