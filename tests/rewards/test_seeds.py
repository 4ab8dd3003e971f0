"""Rewards that draw random numbers: the same in two runs, whichever worker draws them and in whatever order."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from plait.rewards.functions import reward_functions
from plait.rewards.pool import RewardPool
from plait.rewards.settings import RewardSettings
from tests.rewards import samples
from tests.rewards.samples import group

DRAWING = """
def standard(completions, **_):
    import random
    return [random.random() for _ in completions]

def numpy(completions, log_extra, **_):
    import random, numpy
    log_extra("after", [random.random() for _ in completions])  # the import has moved nothing
    return numpy.random.rand(len(completions)).tolist()

def torch(completions, **_):
    import torch
    return torch.rand(len(completions)).tolist()
"""
AT_THE_TOP = """
import numpy, numpy.random
from random import random
DRAWN = random() + numpy.random.rand()
def numpy_(completions, **_): return numpy.random.rand(len(completions)).tolist()
def drawn(completions, **_): return [DRAWN] * len(completions)
"""


def drawn(functions: list[str], uids: list[int], workers: int, seed: int = 5) -> dict[int, tuple]:
    """Prompt uid → all that its scoring drew."""
    with RewardPool(reward_functions(functions), RewardSettings(workers=workers, timeout_s=60), seed=seed) as pool:
        results = pool.score([sample for uid in uids for sample in group(uid, "a", "b")])
    return {r.samples[0].prompt.uid: (*r.scores.items(), r.extras.get("after")) for r in results}


@pytest.mark.parametrize("function", ["standard", "numpy"])
def test_what_is_drawn_depends_on_seed_function_and_samples_alone(tmp_path: Path, function: str) -> None:
    """Also in a worker's first call, in whose body the library is first imported."""
    (tmp_path / "drawing.py").write_text(DRAWING)
    functions = [f"{tmp_path}/drawing.py:{function}"]
    first = drawn(functions, [0, 1, 2, 3], workers=1)
    assert len({repr(values) for values in first.values()}) == 4, "every group draws numbers of its own"
    assert drawn(functions, [3, 1], workers=1) == {uid: first[uid] for uid in (3, 1)}, "as after a resume"
    assert drawn(functions, [2, 0, 3, 1], workers=2) == first
    assert drawn(functions, [0], workers=1, seed=6)[0] != first[0]


def test_torch_imported_by_the_function(tmp_path: Path) -> None:
    (tmp_path / "drawing.py").write_text(DRAWING)
    functions = [f"{tmp_path}/drawing.py:torch"]
    first = drawn(functions, [0, 1], workers=1)
    assert drawn(functions, [1], workers=1)[1] == first[1] != first[0]


def test_a_library_that_another_function_brings_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "drawing.py").write_text(DRAWING)
    (tmp_path / "top.py").write_text(AT_THE_TOP)
    alone = f"{tmp_path}/drawing.py:numpy"
    by_itself = drawn([alone], [0, 1], workers=1)
    beside = drawn([alone, f"{tmp_path}/top.py:numpy_"], [0, 1], workers=1)
    for uid in (0, 1):
        assert beside[uid][0] == by_itself[uid][0]
        assert beside[uid][-1] == by_itself[uid][-1]


def test_what_a_file_draws_when_it_is_imported_is_the_same_in_every_worker(tmp_path: Path) -> None:
    (tmp_path / "top.py").write_text(AT_THE_TOP)
    once, again = (drawn([f"{tmp_path}/top.py:drawn"], [0], workers=1) for _ in range(2))
    assert once == again


def test_the_standard_generator_by_hand() -> None:
    ((_, scores), _) = drawn([samples.noisy], [7], workers=1)[7]
    expected = random.Random("5/noisy/7.0,7.1")
    assert scores == (expected.random(), expected.random())
