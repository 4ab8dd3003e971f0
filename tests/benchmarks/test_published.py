"""Published times are predicted as the page on predictions says, and the fitted constants are the best ones."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from plait.cli import main
from plait.cost.cluster_file import read_cluster
from plait.cost.hardware import Software
from tests.cases import slow_but
from tests.given_plan import leave_others_out

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


@pytest.mark.parametrize("rows", [3, pytest.param(None, marks=pytest.mark.slow)], ids=["first rows", "all"])
def test_the_page_has_the_tables(published: ModuleType, rows: int | None) -> None:
    page = (ROOT / "docs/predictions.md").read_text().splitlines()
    for table in published.tables():
        assert not [line for line in islice(table, rows) if line not in page]


def test_three_constants_predict_the_heuristic_within_eight_percent(published: ModuleType) -> None:
    points = list(published.real_points())
    assert len(points) == 36
    assert published.mean_error(points) < 0.08


@pytest.mark.slow
def test_the_constants_are_the_fit(published: ModuleType) -> None:
    """A tenth more or less of any of them is worse."""
    points = list(published.real_points())
    stated = read_cluster(str(ROOT / "recipes/clusters/real.yaml")).software
    least = published.mean_error(points)
    for name in published.FITTED:
        for factor in (0.9, 1.1):
            other = replace(stated, **{name: factor * getattr(stated, name)})
            assert published.mean_error(points, lambda one, other=other: published.seconds_of(one, other)) > least


def test_weak_scaling_is_labelled_as_simulated_with_its_error(
    published: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the published points, which it takes from beside it."""
    assert sys.modules["published"] is published
    assert benchmark("weak_scaling").main(["--tiny"]) == 0
    out = capsys.readouterr().out
    assert "simulated seconds" in out
    rows = [line for line in out.splitlines() if line.startswith(("| 2 ", "| 4 "))]
    assert len(rows) == 2
    assert cells(rows[0])[3] == "100%", "of the fewest devices, by definition"
    assert all(cell.endswith("± 5%") for cell in cells(rows[0])[1:3] + cells(rows[1])[1:4])
    assert all(cell.endswith(("± 5%", "does not fit")) for cell in (cells(row)[4] for row in rows))


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_nothing_is_fitted_to_hybridflow() -> None:
    """Its engine has two settings of its own: the floor of a layer, plait's default, and a pool of all that is left."""
    real, hybridflow = (read_cluster(str(ROOT / f"recipes/clusters/{name}.yaml")) for name in ("real", "hybridflow"))
    assert hybridflow.software.layer_s == Software().layer_s
    assert replace(hybridflow.software, pool_share=0.0, layer_s=real.software.layer_s) == real.software
    assert (hybridflow.device, hybridflow.intra, hybridflow.inter) == (real.device, real.intra, real.inter)


def test_seconds_of_hybridflow_are_its_tokens_by_its_throughput(published: ModuleType) -> None:
    """2,097,152 tokens of a step, at 5,650 a second on 8 devices: 371 s."""
    row = next(row for row in published.hybridflow_points() if row.devices == 8)
    planning = published.planning_of(row)
    tokens = planning.workload.tokens_of_step(planning.flow)
    assert tokens == 2_097_152
    assert round(tokens / 5650) == row.seconds == 371


def test_bytes_of_transitions_are_those_of_the_paper(published: ModuleType) -> None:
    """70B from 8 stages of 8 to groups of 8: a node takes in 7/8 of 138 GB at 20 GB/s of its link's 25."""
    assert published.transition_seconds("70B", 64) == pytest.approx(7 / 8 * 137.95e9 / 20e9, rel=0.02)


KINDS = (
    "papers",
    "algorithms",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("sizes", "others", "mapper")),
)


def rows_of(published: ModuleType, kind: str) -> list[Any]:
    """Rows of both papers, every algorithm, size and placement; generation cut otherwise than usual."""
    row = published.hybridflow_row
    match kind:
        case "papers":
            named = ("Actor 34B, 384 tokens", "Both 7B, 128 tokens")
            heuristic = [point for point in published.real_points() if point.name in named]
            return [*heuristic, *published.hybridflow_points()][:4]
        case "algorithms":
            return [row("7B", 8, algorithm) for algorithm in published.ALGORITHMS]
        case "sizes":
            return [row("13B", 16), row("34B", 32, plan="colocated"), row("70B", 64), row("13B", 32, plan="split")]
        case "others":
            large = [row("70B", 128, algorithm) for algorithm in ("ReMax", "Safe-RLHF", "GRPO")]
            cut = [row("13B", 16, decode_tp=ways) for ways in (2, 8)]
            return [*large, *cut, *published.hybridflow_points(), row("34B", 128, plan="standalone")]
        case _:
            return [row("13B", 128, plan="hybridflow")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_user_predicts_every_kind_of_row_by_recipe_cluster_file_and_plan(
    kind: str, published: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last digit what the tables have; it fits in memory, and a step takes no less than its products would and
    no more than an hour."""
    monkeypatch.chdir(ROOT)
    leave_others_out(monkeypatch)
    for row in rows_of(published, kind):
        assert main([*published.command(row), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["seconds_per_step"] == published.seconds_of(row), row
        assert found["feasible"], row
        longest = max(call["terms"].get("products", 0.0) for call in found["calls"])
        assert longest < found["seconds_per_step"] < 3600, row
        if row.seconds:
            assert found["seconds_per_step"] == pytest.approx(row.seconds, rel=0.17)


@pytest.mark.parametrize("name", slow_but(["real_grpo"], ["real_remax", "real_grpo", "real_safe_rlhf"]))
def test_other_algorithms_in_reals_setting(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """About as long as PPO's 29.5 s there."""
    monkeypatch.chdir(ROOT)
    words = ["--cluster", "recipes/clusters/real.yaml", "--devices", "8", "--plan", "real", "--lengths", "128:128"]
    assert main(["simulate", f"recipes/published/{name}.yaml", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["feasible"]
    assert 10 < found["seconds_per_step"] < 60


def test_a_plan_file_says_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the keys and values nobody says how many there are: the pool is what is left."""
    monkeypatch.chdir(ROOT)
    words = ["simulate", "recipes/published/hybridflow.yaml", "--cluster", "recipes/clusters/hybridflow.yaml"]
    words += ["--devices", "8", "--lengths", "1024:1024", "--json"]
    told = []
    for plan in (["recipes/published/hybridflow-8.json"], ["colocated", "--tp", "8", "--decode-tp", "2"]):
        assert main([*words, "--plan", *plan]) == 0
        told.append(json.loads(capsys.readouterr().out)["seconds_per_step"])
    assert told[0] == told[1]


def test_clusters_carry_the_errors_of_the_page(published: ModuleType) -> None:
    """ReaL's is that of the fit, HybridFlow's of steps that nothing is fitted to."""
    for name, rows in (("real", published.real_points()), ("hybridflow", published.hybridflow_points())):
        checked = read_cluster(str(ROOT / f"recipes/clusters/{name}.yaml")).checked
        assert checked is not None
        assert checked.error == pytest.approx(published.mean_error(list(rows)), abs=0.005)
