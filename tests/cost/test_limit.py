"""The machine's limit, by hand."""

from __future__ import annotations

import pytest

from plait.cost.limit import IdealStep, MachineRates, ideal_steps, limit_seconds
from plait.models.shape import ModelShape

SHAPE = ModelShape(
    layers=2,
    hidden=4,
    intermediate=8,
    heads=2,
    kv_heads=1,
    head_dim=2,
    vocabulary=10,
    tied=True,
    max_positions=64,
    attention_parameters=48,
)
LAYERS = 2 * (48 + 3 * 4 * 8)
HEAD = 4 * 10


def test_steps_of_a_group_share_their_prompt() -> None:
    """3 prompt tokens, responses of 1 and 3: prefill, then two steps of the longer one."""
    assert list(ideal_steps([(3, [1, 3])], max_running=8)) == [
        IdealStep(tokens=3, drawn=2, attended=1 + 2 + 3, context=3),
        IdealStep(tokens=1, drawn=1, attended=4, context=3 + 1),
        IdealStep(tokens=1, drawn=1, attended=5, context=3 + 2),
    ]


def test_a_prompt_is_read_once_for_all_its_samples() -> None:
    *_, last = ideal_steps([(3, [2, 2]), (5, [2])], max_running=8)
    assert last == IdealStep(tokens=3, drawn=3, attended=4 + 4 + 6, context=(3 + 1 + 1) + (5 + 1))


def test_samples_wait_for_places() -> None:
    steps = list(ideal_steps([(3, [2]), (3, [1]), (4, [1])], max_running=1))
    assert [step.drawn for step in steps] == [1, 1, 1, 1]
    assert [step.tokens for step in steps] == [3, 1, 3, 4]


def test_all_tokens_are_drawn() -> None:
    groups = [(7, [3, 1, 9]), (2, [4]), (5, [1, 1])]
    for max_running in (1, 2, 8):
        steps = list(ideal_steps(groups, max_running))
        assert sum(step.drawn for step in steps) == 19
        assert sum(step.tokens for step in steps) == (7 + 2 + 5) + (19 - 6)


@pytest.mark.parametrize(
    ("rates", "seconds"),
    [
        # bytes: weights of the layers and the head, 5 tokens of 2 layers x 1 head x (2 + 2) elements
        (MachineRates(bytes_per_s=4.0, flops_per_s=1e9), LAYERS + HEAD + 5 * 2 * 4),
        # FLOPs: 2 per weight and token, 1 drawn row; 4 pairs x 2 layers x 2 heads x (2 + 2) elements
        (MachineRates(bytes_per_s=1e9, flops_per_s=2.0), 3 * LAYERS + HEAD + 4 * 2 * 2 * 4),
    ],
)
def test_the_slower_of_bytes_and_flops(rates: MachineRates, seconds: float) -> None:
    step = IdealStep(tokens=3, drawn=1, attended=4, context=5)
    assert limit_seconds(SHAPE, "float32", [step, step], rates) == pytest.approx(2 * seconds)


def test_experts_are_read_as_far_as_tokens_reach_them() -> None:
    mixture = ModelShape(
        **{**SHAPE.__dict__, "expert_layers": 2, "experts": 8, "experts_per_token": 2, "expert_intermediate": 4}
    )
    expert = 2 * 3 * 4 * 4
    rates = MachineRates(bytes_per_s=4.0, flops_per_s=1e12)
    for tokens, read in ((1, 2), (3, 6), (100, 8)):
        step = IdealStep(tokens=tokens, drawn=0, attended=0, context=0)
        assert limit_seconds(mixture, "float32", [step], rates) == pytest.approx(2 * 48 + HEAD + read * expert)
