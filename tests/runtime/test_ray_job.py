"""The documented `ray job submit`, with a tiny recipe in the place of the demo, on a cluster of one node."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plait.recipes.recipe import Recipe
from plait.runtime.stored_recipe import recipe_text

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240


def documented() -> list[str]:
    text = (ROOT / "docs/cluster.md").read_text()
    line = text[text.index("$ ray job submit") + 2 :].split("\n```")[0]
    return shlex.split(line.replace("\\\n", " "))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def head() -> Iterator[str]:
    """Address of a cluster that takes jobs."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    for name in ("aiohttp", "aiohttp_cors", "opencensus", "virtualenv"):
        pytest.importorskip(name, reason="Ray takes jobs with `ray[default]` only")
    port = free_port()
    folder = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus", "4"]
    process = subprocess.Popen(
        [*command, "--port", str(free_port()), "--dashboard-port", str(port), "--temp-dir", f"/tmp/ray-{os.getpid()}"],
        env=os.environ | {"PATH": folder, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + DEADLINE_S
    try:
        while True:
            try:
                urllib.request.urlopen(f"{address}/api/version", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, "the cluster has not come up"
                assert time.monotonic() < end, "the cluster takes too long"
                time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.slow
def test_the_documented_job_trains(head: str, tmp_path: Path, make_recipe: Callable[..., Recipe]) -> None:
    run_dir, recipe = tmp_path / "run", tmp_path / "recipe.yaml"
    recipe.write_text(recipe_text(make_recipe()))
    places = {"http://head:8265": head, "recipes/demo.yaml": str(recipe), "/shared/runs/demo": str(run_dir)}
    command = documented()
    assert set(places) <= set(command)
    ray, *arguments = [places.get(word, word) for word in command]
    assert ray == "ray"
    done = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "connected to the Ray cluster that runs" in done.stdout
    assert [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert {path.name for path in (run_dir / "workers").iterdir()} >= {"rank0.log", "rank1.log"}
