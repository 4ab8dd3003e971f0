"""Training over two machines made of network namespaces, with a slow link: its result, what passes the link, what
listens, and a link that is cut. Skipped where namespaces may not be made."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.cost.model_parameters import parameters_of
from plait.layout.holdings import weights
from plait.layout.mesh import Cluster, Layout
from plait.layout.move import plan_move
from plait.layout.move_plan import MoveKind
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.prediction.network import Machines
from plait.runtime.prepare import prepare
from plait.schedule.timeline import load_any
from tests.launch.nodes.namespaces import ADDRESSES, cut, inside, listening_in, processes_of, received_bytes
from tests.launch.nodes.namespaces import machines as machines
from tests.runs.nodes import begin, ends, left_of, wait_for
from tests.runs.placed_runs import GRPO
from tests.runs.plan_files import write_plan
from tests.runs.plans import assert_equal_runs

pytestmark = pytest.mark.slow
APART = {"actor.generate": "2,3 dp2", "actor.train": "0,1 dp2", "ref.logprobs": "0"}
"""Node 0 trains, both ranks of node 1 generate: all weights go there after each step."""


def begun(machines: list[str], recipe: Recipe) -> list[subprocess.Popen[str]]:
    options = ["--nodes", "2", "--leader", f"{ADDRESSES[0]}:29500"]
    return [
        begin(recipe, number, [*options, "--node", str(number)], before=inside(name))
        for number, name in enumerate(machines)
    ]


def test_weights_enter_the_other_machine_once_as_planned_and_nothing_else_listens(
    machines: list[str], place: Path, placed: Callable[..., Recipe]
) -> None:
    flow, keys = GRPO
    keys = {**keys, "plan": str(write_plan(place, "apart", APART)), "steps": 6}
    here = placed(flow, "apart-here", **keys)
    assert run(here).finished
    there = placed(flow, "apart-there", **keys)
    before = received_bytes(machines[1], 1)
    commands = begun(machines, there)
    wait_for(there.run_dir / "metrics.jsonl", commands)
    assert listening_in(machines[0]) == {"01004D0A"}, "gloo, on 10.77.0.1"
    assert listening_in(machines[1]) == {"02004D0A"}
    leader, other = ends(commands)
    assert (leader.code, other.code) == (0, 0), leader.text + other.text
    assert_equal_runs(there.run_dir, here.run_dir, tolerance=0.0)
    entered = received_bytes(machines[1], 1) - before
    planned = planned_bytes(there)
    assert planned < entered < 1.3 * planned, "a second copy would be 2.0; rows, words and headers are the rest"


def planned_bytes(recipe: Recipe) -> int:
    """What the plan of the move has enter node 1, times the moves that the run did."""
    models = prepare(recipe, machines=Machines(2)).models
    parameters = parameters_of(models)["actor"]
    trained, copied = (Layout.on(ranks, dp=2) for ranks in ((0, 1), (2, 3)))
    home, copies = weights(parameters, trained, "float64", "home"), weights(parameters, copied, "float64", "copies")
    entering = plan_move(home, copies, Cluster(2, 2)).traffic.node_bytes[1][1]
    assert entering == 8 * sum(param.num_elements for param in parameters.params), "each weight once, for two ranks"
    spans = load_any(recipe.run_dir / "trace.json").spans
    arrived = [span for span in spans if span.rank in (2, 3) and span.action.startswith("actor.weights")]
    received = sum(span.bytes for span in arrived if span.kind == MoveKind.RECV)
    moves, rest = divmod(received, 2 * entering)
    assert moves == recipe.steps
    assert rest == 0, "both ranks receive all of it: from the other node, or from each other"
    return moves * entering


def test_a_cut_link_is_named_and_the_run_goes_on_alone(
    machines: list[str], place: Path, placed: Callable[..., Recipe]
) -> None:
    flow, keys = GRPO
    keys = {**keys, "plan": "colocated", "devices": 2, "steps": 8, "checkpoint.every": 1}
    whole = placed(flow, "cut-not", **keys)
    assert run(whole).finished
    recipe = placed(flow, "cut", **keys, restarts=1)
    commands = begun(machines, recipe)
    wait_for(recipe.run_dir / "checkpoints" / "step-2", commands)
    cut(machines)
    started = time.monotonic()
    [other] = ends(commands[1:])
    assert time.monotonic() - started < 30
    assert "the leader is lost: nothing was received from it for" in other.text
    [leader] = ends(commands[:1])
    assert leader.code == 0, leader.text
    assert re.search(
        r"error: rank 1 on node 1 \(\S+\) is lost with its node: nothing was received from it for 1\d s", leader.text
    )
    assert re.search(r"restart 1 of 1: .* on 1 rank of 1 node, plan colocated", leader.text)
    assert_equal_runs(recipe.run_dir, whole.run_dir)
    assert left_of(recipe.run_dir) == []


def test_a_dead_machine_is_named(machines: list[str], place: Path, placed: Callable[..., Recipe]) -> None:
    flow, keys = GRPO
    recipe = placed(flow, "dead", **{**keys, "plan": "colocated", "devices": 2, "steps": 50, "checkpoint.every": 1})
    commands = begun(machines, recipe)
    wait_for(recipe.run_dir / "checkpoints" / "step-1", commands)
    cut(machines)  # a machine without power says no farewell
    for pid in processes_of(machines[1]):
        os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    leader, _ = ends(commands)
    assert time.monotonic() - started < 30
    assert leader.code == 1, leader.text
    assert re.search(r"rank 1 on node 1 \(\S+\) is lost with its node: nothing was received from it", leader.text)
    assert re.search(r"the checkpoint of step \d+ is good", leader.text)
    assert left_of(recipe.run_dir) == []
