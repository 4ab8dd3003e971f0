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

{first}
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
from plait.runtime.process import resident_bytes

torch.set_num_threads(1)
weight_OI = torch.randn(128, 128, requires_grad=True)
for rows in range(200, 420):
    x = torch.randn(rows, 128, requires_grad=True)
    cpu_linear.linear(x, weight_OI).sum().backward()
    if rows in (300, 419):
        print("MiB", resident_bytes() >> 20, flush=True)
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
        print("MiB", resident_bytes() >> 20, flush=True)
"""


def said_by(script: str, **environment: str) -> str:
    """What a process without bounds of its environment prints."""
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    run = subprocess.run(
        [sys.executable, "-c", script], env=inherited | environment, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def grown_mib(said: str) -> int:
    before, after = (int(line.split()[1]) for line in said.splitlines() if line.startswith("MiB "))
    return after - before


@pytest.fixture(scope="module")
def said() -> str:
    """By a process that has met many lengths, and then first few shapes and then many."""
    script = SCRIPT.format(entrance="plait.runtime.api", others=[8, NUM_KERNELS], first=ALL_LENGTHS)
    return said_by(script, ONEDNN_VERBOSE="2")


def test_memory_does_not_grow_with_the_lengths_met(said: str) -> None:
    """By 0 to 2 MiB; without the bounds by 119."""
    assert grown_mib(said) < 25


@pytest.mark.slow
def test_training_on_varying_lengths_stays_as_large_as_it_is() -> None:
    """By 0 to 10 MiB from step 30 to 160; without the bounds by 350."""
    assert grown_mib(said_by(STEPS_OF_ALL_LENGTHS)) < 60


def made_again(said: str, num: int) -> list[bool]:
    """Whether oneDNN compiles for a shape once more that it has met before so many others; for `num` numbers."""
    texts = [text.partition("that was it")[0] for text in said.split("again\n")[1:]]
    assert len(texts) == num
    if not all("create:cache_" in text for text in texts):
        pytest.skip("this torch's oneDNN does not say what it compiles")
    return ["create:cache_miss" in text for text in texts]


def of_many(entrance: str, **environment: str) -> list[bool]:
    script = SCRIPT.format(entrance=entrance, others=[NUM_KERNELS], first="")
    return made_again(said_by(script, ONEDNN_VERBOSE="2", **environment), 1)


def test_kernels_of_a_few_shapes_are_kept_and_of_many_not_all(said: str) -> None:
    assert made_again(said, 2) == [False, True]


@pytest.mark.slow
def test_nor_are_they_in_a_rank() -> None:
    assert of_many("plait.runtime.processes.worker") == [True]


@pytest.mark.slow
def test_what_the_user_has_set_stays() -> None:
    assert of_many("plait.runtime.api", ONEDNN_PRIMITIVE_CACHE_CAPACITY="2000") == [False]
