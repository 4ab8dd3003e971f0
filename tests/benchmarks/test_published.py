"""Published times are foretold as the page on predictions says, and the fitted constants are the best ones."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest

from plait.cli import main
from plait.cost.cluster import read_cluster
from plait.cost.hardware import Software

ROOT = Path(__file__).parents[2]


def benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def published() -> ModuleType:
    return benchmark("published")


@pytest.mark.parametrize("rows", [4, pytest.param(None, marks=pytest.mark.slow)], ids=["first rows", "all"])
def test_the_page_has_the_tables(published: ModuleType, rows: int | None) -> None:
    page = (ROOT / "docs/predictions.md").read_text().splitlines()
    for table in published.tables():
        assert not [line for line in islice(table, rows) if line not in page]


def test_three_constants_foretell_the_heuristic_within_eight_percent(published: ModuleType) -> None:
    points = list(published.real_points())
    assert len(points) == 36
    assert published.mean_error(points, published.real_seconds) < 0.08


def test_the_constants_are_the_fit(published: ModuleType) -> None:
    """A tenth more or less of any of them is worse."""
    points = list(published.real_points())
    stated = read_cluster(str(ROOT / "recipes/clusters/real.yaml")).software
    least = published.mean_error(points, published.real_seconds)
    for name in published.FITTED:
        for factor in (0.9, 1.1):
            other = replace(stated, **{name: factor * getattr(stated, name)})
            assert published.mean_error(points, lambda one, other=other: published.real_seconds(one, other)) > least


def test_weak_scaling_is_labelled_as_simulated_with_its_error(
    published: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the published points, which it takes from beside it."""
    assert sys.modules["published"] is published
    assert benchmark("weak_scaling").main(["--tiny"]) == 0
    out = capsys.readouterr().out
    assert "simulated seconds" in out
    rows = [line for line in out.splitlines() if line.startswith(("| 8 ", "| 16 "))]
    assert len(rows) == 2
    assert all(row.count("± 4%") >= 2 for row in rows)


def test_nothing_is_fitted_to_hybridflow() -> None:
    """Its engine has two settings of its own: the floor of a layer, plait's default, and a pool of all that is left."""
    real, hybridflow = (read_cluster(str(ROOT / f"recipes/clusters/{name}.yaml")) for name in ("real", "hybridflow"))
    assert hybridflow.software.layer_s == Software().layer_s
    assert replace(hybridflow.software, pool_share=0.0, layer_s=real.software.layer_s) == real.software
    assert (hybridflow.device, hybridflow.intra, hybridflow.inter) == (real.device, real.intra, real.inter)


def test_bytes_of_transitions_are_those_of_the_paper(published: ModuleType) -> None:
    """70B from 8 stages of 8 to groups of 8: a node takes in 7/8 of 138 GB at 20 GB/s of its link's 25."""
    assert published.transition_seconds("70B", 64) == pytest.approx(7 / 8 * 137.95e9 / 20e9, rel=0.02)


def test_a_user_foretells_a_row_by_recipe_and_cluster_file(
    published: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """ReaL's 34B actor beside models of 7B on 32 devices, by its heuristic plan: as the table has it."""
    (row,) = [point for point in published.real_points() if point.name == "Actor 34B, 384 tokens"]
    command = [
        "simulate",
        str(ROOT / "recipes/published/real.yaml"),
        "--plan",
        "real",
        "--json",
        "--lengths",
        "128:384",
    ]
    command += ["--cluster", str(ROOT / "recipes/clusters/real.yaml"), "--devices", str(row.devices)]
    for key, value in row.keys:
        command += [f"--{key}", str(value)]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seconds_per_step"] == pytest.approx(published.real_seconds(row), rel=1e-3)
    assert {(one["tp"], one["pp"], one["dp"]) for one in found["calls"]} == {(8, 4, 1)}
