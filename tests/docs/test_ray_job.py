"""The demo as a job of a Ray cluster whose head node has no cores for it, by the command of docs/cluster.md."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.observe.run_log import read_rows
from tests.docs.test_cluster import ROOT, group
from tests.runs.nodes import ends, free_port, started

pytestmark = pytest.mark.slow
TINY = "--steps 2 --prompts_per_step 2 --samples_per_prompt 2 --evaluation.items 4 --dtype float32"


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address for jobs of a cluster: a head with no cores, and a node with two."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    pytest.importorskip("aiohttp_cors", reason="jobs need `ray[default]`")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    port = free_port()
    head = {
        "num_cpus": 0,
        "include_dashboard": True,
        "dashboard_port": port,
        "dashboard_agent_listen_port": free_port(),
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=2, dashboard_agent_listen_port=free_port())
        cluster.wait_for_nodes()
        _wait_for_agents(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        cluster.shutdown()


def _wait_for_agents(address: str, limit_s: float = 120.0) -> None:
    """Until the cluster takes jobs, which is some seconds after its nodes are there."""
    from ray.job_submission import JobSubmissionClient

    until = time.monotonic() + limit_s
    while True:
        try:
            JobSubmissionClient(address).submit_job(entrypoint="true")
            return
        except (ConnectionError, RuntimeError):
            if time.monotonic() >= until:
                raise
        time.sleep(1.0)


def test_a_job_trains_on_the_nodes_of_the_cluster(dashboard: str, tmp_path: Path) -> None:
    [line] = group("ray job submit")
    run_dir = tmp_path / "job"
    line = line.replace("http://node0:8265", dashboard).replace("/shared/recipe.yaml", str(ROOT / "recipes/demo.yaml"))
    line = line.replace("/shared/runs/job", str(run_dir)).replace("--devices 16", "--devices 2")
    (job,) = ends([started(shlex.split(f"{line} {TINY}"), {}, tmp_path)], limit_s=500)
    assert job.code == 0, job.text
    assert "connected to the Ray cluster that runs" in job.text
    assert "Ray starts the ranks of 1 node" in job.text
    assert "succeeded" in job.text
    assert [row["step"] for row in read_rows(run_dir / "metrics.jsonl")] == [1, 2]
    assert {path.name for path in (run_dir / "workers").glob("rank*.log")} == {"rank0.log", "rank1.log"}
    assert list((run_dir / "final").glob("*.safetensors"))
