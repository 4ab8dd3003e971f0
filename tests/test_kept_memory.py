"""What oneDNN keeps is bounded in every process that computes, whatever it imports first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from plait.kept_memory import NUM_KERNELS
from plait.models import cpu_linear

pytestmark = pytest.mark.skipif(not cpu_linear.AVAILABLE, reason="this torch lacks the operators")

SCRIPT = """
import {entrance}
import torch
from plait.models import cpu_linear

weight_OI = torch.randn(64, 64)
with torch.no_grad(), cpu_linear.everywhere():
    for rows in (2000, *range(100, 100 + {others})):
        cpu_linear.linear(torch.randn(rows, 64), weight_OI)
    print("again", flush=True)
    cpu_linear.linear(torch.randn(2000, 64), weight_OI)
"""


def made_again(entrance: str, others: int, environment: dict[str, str]) -> bool:
    """Whether oneDNN compiles for a shape once more that it has met before so many others."""
    inherited = {name: value for name, value in os.environ.items() if name != "ONEDNN_PRIMITIVE_CACHE_CAPACITY"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(entrance=entrance, others=others)],
        env={**inherited, "ONEDNN_VERBOSE": "2", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    said = run.stdout.partition("again")[2]
    hits, misses = said.count("create:cache_hit"), said.count("create:cache_miss")
    if hits + misses == 0:
        pytest.skip("this torch's oneDNN does not say what it compiles")
    return misses > 0


@pytest.mark.parametrize("entrance", ["plait.runtime.api", "plait.runtime.ranks.worker"])
def test_kernels_of_many_shapes_are_not_all_kept(entrance: str) -> None:
    assert made_again(entrance, NUM_KERNELS, {})


def test_kernels_of_a_few_shapes_are() -> None:
    assert not made_again("plait.runtime.api", 8, {})


def test_what_the_user_has_set_stays() -> None:
    assert not made_again("plait.runtime.api", NUM_KERNELS, {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "500"})
