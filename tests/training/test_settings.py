"""Learning-rate schedules by hand, and bytes per parameter."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from plait.training.memory import parameter_bytes
from plait.training.settings import OptimizerSettings
from plait.yaml_text import parse


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # Peak 8, warm-up of 2 steps, 6 steps in all: 4 steps of decay after the warm-up; step 6 is past the end.
        ("constant", [4, 8, 8, 8, 8, 8, 8]),
        ("linear", [4, 8, 8, 6, 4, 2, 0]),
        ("cosine", [4, 8, 8, 4 + 4 * 0.5**0.5, 4, 4 - 4 * 0.5**0.5, 0]),
        ("polynomial", [4, 8, 8, 6, 4, 2, 0]),
        # √(2 / step) of the peak
        ("inverse_sqrt", [4, 8, 8, 8 * (2 / 3) ** 0.5, 8 * 0.5**0.5, 8 * (2 / 5) ** 0.5, 8 * (1 / 3) ** 0.5]),
        ("constant_with_warmup", [4, 8, 8, 8, 8, 8, 8]),
        # A quarter of the peak is the least: 2 + 3/4 of what decays to 0.
        ("linear, min_lr_ratio 0.25", [4, 8, 8, 6.5, 5, 3.5, 2]),
        ("cosine_with_min_lr, min_lr_ratio 0.25", [4, 8, 8, 5 + 3 * 0.5**0.5, 5, 5 - 3 * 0.5**0.5, 2]),
        # (1 − x)² with x = 0, 1/4, 1/2, 3/4, 1
        ("polynomial, power 2", [4, 8, 8, 4.5, 2, 0.5, 0]),
        ("polynomial, min_lr_ratio 0.25, power 2", [4, 8, 8, 2 + 0.75 * 4.5, 3.5, 2 + 0.75 * 0.5, 2]),
    ],
)
def test_schedules_by_hand(schedule, expected):
    name, *keys = schedule.split(", ")
    settings = OptimizerSettings(
        learning_rate=8, schedule=name, warmup_steps=2, **{k: float(v) for k, v in (key.split() for key in keys)}
    )
    assert [settings.learning_rate_at(step, 6) for step in range(7)] == pytest.approx(expected, abs=1e-12)


def test_inverse_sqrt_without_a_warm_up():
    settings = OptimizerSettings(learning_rate=8, schedule="inverse_sqrt")
    assert [settings.learning_rate_at(step, 6) for step in (0, 10_000, 30_000)] == [8, 8 * 0.5**0.5, 4]


def test_the_warm_up_as_a_share_is_rounded_up():
    """0.3 of 5 optimizer steps are 2: as `warmup_steps: 2`, for each role with its own number of steps."""
    share, steps = (OptimizerSettings(learning_rate=8, schedule="linear", **one) for one in KINDS)
    assert [share.learning_rate_at(step, 5) for step in range(6)] == [
        steps.learning_rate_at(step, 5) for step in range(6)
    ]
    assert [share.warmup(total) for total in (1, 3, 4, 10, 11)] == [1, 1, 2, 3, 4]


KINDS = ({"warmup_ratio": 0.3}, {"warmup_steps": 2})


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"warmup_steps": 2, "warmup_ratio": 0.1}, r"warmup_steps \(2\) and warmup_ratio \(0.1\) are both set"),
        ({"schedule": "constant_with_warmup"}, "needs a warm-up; set `warmup_steps` or `warmup_ratio`"),
        ({"schedule": "cosine_with_min_lr"}, "needs a minimum; set `min_lr_ratio`"),
        ({"min_lr_ratio": 0.1}, "min_lr_ratio has no effect with schedule: constant"),
        ({"schedule": "inverse_sqrt", "min_lr_ratio": 0.1}, "no effect with schedule: inverse_sqrt"),
        ({"schedule": "linear", "power": 2}, "power has no effect with schedule: linear"),
    ],
)
def test_settings_without_effect_are_refused(keys, says):
    with pytest.raises(ValidationError, match=says):
        OptimizerSettings(**keys)


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize(
    ("schedule", "ours", "theirs"),
    [
        ("constant_with_warmup", {}, {}),
        ("linear", {}, {}),
        ("cosine", {}, {}),
        ("cosine_with_min_lr", {"min_lr_ratio": 0.1}, {"min_lr_rate": 0.1}),
        ("polynomial", {"power": 2.5, "min_lr_ratio": 0.1}, {"power": 2.5, "lr_end": 0.02}),
        ("inverse_sqrt", {}, {}),
    ],
)
def test_schedules_are_those_of_transformers(schedule, ours, theirs, warmup):
    """After the warm-up, of which ours is a step ahead: the first optimizer step already moves."""
    import torch
    from transformers import get_scheduler

    if schedule == "constant_with_warmup" and warmup == 0:
        pytest.skip("refused here")
    settings = OptimizerSettings(learning_rate=0.2, schedule=schedule, warmup_steps=warmup, **ours)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.2)
    scheduler = get_scheduler(schedule, optimizer, warmup, 10, scheduler_specific_kwargs=theirs)
    rates = []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    found = [settings.learning_rate_at(step, 10) for step in range(12)]
    end = 12 if schedule != "cosine" and schedule != "cosine_with_min_lr" else 11  # past the end theirs rises again
    assert found[warmup:end] == pytest.approx(rates[warmup:end], abs=1e-15)
    assert found[:warmup] == pytest.approx(rates[1 : warmup + 1])


def test_a_run_shorter_than_its_warm_up():
    settings = OptimizerSettings(learning_rate=8, schedule="linear", warmup_steps=4)
    assert [settings.learning_rate_at(step, 2) for step in range(2)] == [2, 4]


@pytest.mark.parametrize("field", ["learning_rate", "epsilon", "max_grad_norm", "max_skipped_steps"])
def test_zero_is_refused(field):
    with pytest.raises(ValidationError, match=field):
        OptimizerSettings(**{field: 0})


def test_a_norm_without_bound_is_written_as_yaml_does():
    assert OptimizerSettings(max_grad_norm=parse(".inf")).max_grad_norm == math.inf
    with pytest.raises(ValidationError, match=r"expected a number \(infinity is \.inf\)"):
        OptimizerSettings(max_grad_norm=parse("inf"))
    described = OptimizerSettings.model_fields["max_grad_norm"].description
    assert described is not None
    assert described.endswith("(.inf: never)")


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, -0.1)])
def test_betas_are_below_one(betas):
    with pytest.raises(ValidationError, match="betas"):
        OptimizerSettings(betas=betas)


def test_bytes_per_parameter():
    assert parameter_bytes("bfloat16", trained=True).total == 2 + 4 + 8 + 4
    assert parameter_bytes("float32", trained=True).total == 4 + 0 + 8 + 4
    assert parameter_bytes("float64", trained=True).total == 8 + 0 + 16 + 8
    assert parameter_bytes("bfloat16", trained=False).total == 2


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("warmup_steps", 0.1, r"expected a number of optimizer steps, found 0\.1; a share is `warmup_ratio`"),
        ("max_grad_norm", 0, r"expected a number above 0, found 0; \.inf never clips"),
        ("max_grad_norm", None, r"expected a number above 0, found null; \.inf never clips"),
    ],
)
def test_what_transformers_means_by_a_number_is_told(key, value, says):
    with pytest.raises(ValueError, match=says):
        OptimizerSettings(**{key: value})
