"""What matrix libraries keep is bounded in every process that computes, whatever it imports first; what a process
holds does not grow with the number of shapes that it has met."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from plait.kept_memory import NUM_KERNELS
from plait.models.compute import cpu_linear

pytestmark = pytest.mark.skipif(not cpu_linear.AVAILABLE, reason="this torch lacks the operators")

SCRIPT = """
import {entrance}
import torch
from plait.models.compute import cpu_linear

weight_OI = torch.randn(64, 64)
with torch.no_grad(), cpu_linear.everywhere():
    for others in {others}:
        for rows in (2000, *range(100, 100 + others)):
            cpu_linear.linear(torch.randn(rows, 64), weight_OI)
        print("again", flush=True)
        cpu_linear.linear(torch.randn(2000, 64), weight_OI)
        print("that was it", flush=True)
"""


ALL_LENGTHS = """
import torch
from plait.models.compute import cpu_linear
from plait.runtime.process import resident_bytes

torch.set_num_threads(1)
weight_OI = torch.randn(128, 128, requires_grad=True)
for rows in range(200, 420):
    x = torch.randn(rows, 128, requires_grad=True)
    cpu_linear.linear(x, weight_OI).sum().backward()
    if rows in (300, 419):
        print(resident_bytes() >> 20)
"""

STEPS_OF_ALL_LENGTHS = """
import random
import torch
from plait.data.packed import pack
from plait.runtime.process import resident_bytes
from tests.models.tiny import tiny_model

torch.set_num_threads(1)
draw = random.Random(0)
sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 1, "head_dim": 32}
model = tiny_model("llama", dtype=torch.float32, weight_scale=0.02, max_position_embeddings=512, **sizes)

def ids(least, most):
    return [draw.randrange(3, 300) for _ in range(draw.randint(least, most))]

for step in range(160):
    batch = pack([(ids(20, 120), [ids(5, 100) for _ in range(4)]) for _ in range(draw.randint(1, 4))])
    with torch.no_grad():
        model.logprobs(batch, 1.0)
    model.logprobs(batch, 1.0)[0].sum().backward()
    model.module.zero_grad()
    if step in (30, 159):
        print(resident_bytes() >> 20)
"""


def grown_mib(script: str) -> int:
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    run = subprocess.run([sys.executable, "-c", script], env=inherited, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    before, after = map(int, run.stdout.split())
    return after - before


def test_memory_does_not_grow_with_the_lengths_met() -> None:
    """By 0 to 2 MiB; without the bounds by 119."""
    assert grown_mib(ALL_LENGTHS) < 25


@pytest.mark.slow
def test_training_on_varying_lengths_stays_as_large_as_it_is() -> None:
    """By 0 to 10 MiB from step 30 to 160; without the bounds by 350."""
    assert grown_mib(STEPS_OF_ALL_LENGTHS) < 60


def made_again(entrance: str, others: list[int], environment: dict[str, str]) -> list[bool]:
    """Whether oneDNN compiles for a shape once more that it has met before so many others; for several numbers."""
    inherited = {name: value for name, value in os.environ.items() if name != "ONEDNN_PRIMITIVE_CACHE_CAPACITY"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(entrance=entrance, others=others)],
        env={**inherited, "ONEDNN_VERBOSE": "2", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    said = [text.partition("that was it")[0] for text in run.stdout.split("again\n")[1:]]
    assert len(said) == len(others)
    if not all("create:cache_" in text for text in said):
        pytest.skip("this torch's oneDNN does not say what it compiles")
    return ["create:cache_miss" in text for text in said]


def test_kernels_of_a_few_shapes_are_kept_and_of_many_not_all() -> None:
    assert made_again("plait.runtime.api", [8, NUM_KERNELS], {}) == [False, True]


@pytest.mark.slow
def test_nor_are_they_in_a_rank() -> None:
    assert made_again("plait.runtime.processes.worker", [NUM_KERNELS], {}) == [True]


@pytest.mark.slow
def test_what_the_user_has_set_stays() -> None:
    assert made_again("plait.runtime.api", [NUM_KERNELS], {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "2000"}) == [False]
