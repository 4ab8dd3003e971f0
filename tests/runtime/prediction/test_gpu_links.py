"""What a plan of a machine with two H100 depends on, which is not there: what they send each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plait.cost.estimate import model_shape
from plait.cost.kept_profiles import keep_profile
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.profile import LinkRecord
from plait.planner.plan_search import Budget
from plait.recipes.recipe_file import load_recipe
from plait.runtime.prediction import machine
from plait.runtime.prediction.choosing import choose
from plait.runtime.prediction.machine import machine_of
from plait.runtime.prediction.planning import Planning
from plait.runtime.prepare import outline
from plait.schedule.plan import Plan
from tests.cost.test_gpu_links import GLOO, H100, of_gpu

RECIPE = Path(__file__).parents[3] / "examples" / "large_ppo.yaml"
MODEL = "qwen2.5-1.5b"
ROWS = ((64, 2.3e-3), (4_096, 2.3e-3), (16_384, 3.4e-3))
"""(tokens, seconds of a layer), as an H100 had them (docs/gpu.md); what else there is has its order of magnitude."""


def keep_h100(links_over: str, links: LinkRecord) -> None:
    measured = of_gpu(
        model=MODEL,
        shape=model_shape(MODEL),
        forward=ROWS,
        backward=tuple((tokens, 2 * seconds) for tokens, seconds in ROWS),
        decode=((1, 512, 6e-5), (256, 512, 1e-4)),
        head=((64, 1e-4), (16_384, 1e-2)),
        capture_s=1e-3,
        products=((64, 1e14), (16_384, 6e14)),
        copy_bytes_per_s=2.8e12,
        packing_bytes_per_s=1e12,
        optimizer_s=2e-11,
        links_over=links_over,
        send=links,
        all_reduce=links,
    )
    keep_profile(measured)


@pytest.fixture
def two_h100(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    monkeypatch.setattr(machine, "machine_name", lambda device: H100)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def found() -> tuple[Plan, str]:
    """The plan that is found by what is kept of this machine, and whose numbers these are."""
    reward = str(RECIPE.parent / "length_reward.py:brief")
    stated = {"model": MODEL, "critic.model": MODEL, "reward.functions": [reward], "prompts_per_step": 64}
    run = outline(load_recipe(RECIPE, [*stated.items(), ("device", "cuda"), ("threads", 1)]), device_memory=80 << 30)
    spec, calibration = machine_of(run.recipe, run.shapes[MODEL], 2)
    lengths = SampleLengths(Lengths.fixed(64), Lengths.lognormal(100, 0.8, 1024))
    planning = Planning(run.recipe, run.flow, run.models, run.shapes, spec, lengths, calibration)
    return choose(planning, Budget(300), 1).best.plan, calibration.source


@pytest.mark.usefixtures("two_h100")
def test_two_gpus_that_nvlink_joins_do_a_call_together() -> None:
    """By 2 GB/s, as two processes had it over gloo, every call stays on one GPU. A file that was written when profiles
    had no other number goes by the kind, and both GPUs share a call."""
    keep_h100("nccl", GLOO)
    slow, by_gloo = found()
    keep_h100("gloo", GLOO)
    fast, by_kind = found()
    assert {len(placement.ranks) for placement in slow.placements} == {1}
    assert max(len(placement.ranks) for placement in fast.placements) == 2
    assert by_gloo.endswith("; links between GPUs as they were measured over NCCL, 2 GB/s and 200 us")
    assert by_kind.endswith("taken as 360 GB/s and 5 us, a share of vendors' numbers of H100")
