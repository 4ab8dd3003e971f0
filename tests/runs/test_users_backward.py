"""A loss whose backward fails: one error with the user's own line, on whichever rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from plait.errors import RunError
from plait.recipes.recipe import Recipe
from plait.runtime.api import run

FLOW = """
import torch

from plait.dataflow import per_group


def flow(prompts, actor, reward):
    samples = actor.generate(prompts)
    actor.train(samples, loss=LOSS, advantages=per_group(above, reward.score(samples), name="advantages"))


def above(scores):
    return scores - scores.mean()


class Odd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient[BEYOND]


def raising(batch, advantages):
    return batch.aggregate(-advantages * Odd.apply(batch.logprobs), "token-mean")


def overwriting(batch, advantages):
    ratios = batch.logprobs.exp()
    share = batch.aggregate(ratios * ratios, "token-mean")
    ratios.mul_(2.0)
    return share
"""
SAID = {
    "raising": "backward of the loss `raising`: .*own.py:23: NameError: name 'BEYOND' is not defined",
    "overwriting": "backward of the loss `overwriting`: .*RuntimeError: one of the variables needed for gradient "
    "computation has been modified by an inplace operation",
}


@pytest.mark.parametrize("loss", SAID)
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_it_is_told_by_name(make_recipe: Callable[..., Recipe], tmp_path: Path, loss: str, devices: int) -> None:
    (tmp_path / "own.py").write_text(FLOW.replace("LOSS", loss))
    keys = {"algorithm": f"{tmp_path}/own.py:flow", "options": {}, "doctor.enabled": False, "devices": devices}
    with pytest.raises(RunError, match=SAID[loss]) as caught:
        run(make_recipe(**keys))
    if loss == "raising":
        assert "in backward" in caught.value.frames
        assert "src/plait" not in f"{caught.value}{caught.value.frames}", "the user's own lines alone"
