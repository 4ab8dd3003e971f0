"""Which part of a run a command is: what its options say, and the variables of torchrun and Slurm."""

from __future__ import annotations

import pytest

from plait.errors import ConfigError
from plait.launch.nodes.place import Attached, NodeOptions, attached, first_host, leader_of

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_NODELIST": "gpu[003-010]",
    "SLURM_JOB_ID": "1234567",
}
SBATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODEID": "0", "SLURM_NODELIST": "a1,a2", "SLURM_JOB_ID": "7"}


def test_nothing_is_said_and_a_run_is_on_this_machine() -> None:
    assert attached("auto", NodeOptions(), {}) is None
    assert attached("local", NodeOptions(), TORCHRUN) is None
    assert attached("auto", NodeOptions(nodes=1), {}) is None
    assert attached("auto", NodeOptions(), {"RANK": "0", "WORLD_SIZE": "1"}) is None


def test_options_say_it() -> None:
    found = attached("auto", NodeOptions(2, 1, "head:4000"), TORCHRUN)
    assert found == Attached(1, 2, 1, ("head", 4000), None, "--node")
    assert not found.leads
    assert found.num_nodes == 2


def test_torchrun_says_it_and_keeps_its_own_port() -> None:
    found = attached("auto", NodeOptions(), TORCHRUN)
    assert found == Attached(5, 8, 1, ("10.0.0.1", 29501), None, "torchrun's variables", nodes=2)
    alone = {name: value for name, value in TORCHRUN.items() if not name.startswith(("TORCHELASTIC", "GROUP", "LOCAL"))}
    found = attached("attach", NodeOptions(), alone)
    assert found is not None
    assert (found.leader, found.node) == (("10.0.0.1", 29500), 5), "by hand: a command on each node"


def test_srun_says_it_and_a_batch_script_does_not() -> None:
    found = attached("auto", NodeOptions(), SRUN)
    assert found == Attached(3, 4, 1, ("gpu003", 20000 + 1234567 % 20000), None, "Slurm's variables", nodes=2)
    assert attached("auto", NodeOptions(), SBATCH) is None, "the script itself is no task of a step"
    assert attached("attach", NodeOptions(), SBATCH) is not None
    own = attached("auto", NodeOptions(leader="x:1"), SRUN | {"SLURM_GPUS_PER_TASK": "1"})
    assert own is not None
    assert (own.leader, own.own_devices) == (("x", 1), True)


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[003-007,12],login", "gpu003"),
        ("r[1,2]-n,x", "r1-n"),
        ("n7,n[8-9]", "n7"),
        ("rack[02-3]n[1,5-8]-ib,x", "rack02n1-ib"),
    ],
)
def test_the_first_of_slurms_hosts(names: str, first: str) -> None:
    assert first_host(names) == first


@pytest.mark.parametrize(
    ("launcher", "options", "environ", "says"),
    [
        ("attach", NodeOptions(), {}, "nothing says which node this is; give `--nodes N --node I --leader HOST:PORT`"),
        ("auto", NodeOptions(nodes=2), {}, "--node and --leader are missing beside --nodes"),
        ("auto", NodeOptions(node=1), {}, "--nodes and --leader are missing beside --node"),
        ("auto", NodeOptions(2, 2, "a:1"), {}, "expected --node from 0 to 1 with --nodes 2, found 2"),
        ("auto", NodeOptions(0, 0, "a:1"), {}, "expected --node from 0 to 0 with --nodes 0"),
        ("auto", NodeOptions(2, 0, "a"), {}, "--leader: expected HOST:PORT with a port from 1 to 65535, found `a`"),
        ("auto", NodeOptions(leader="a:1"), {}, "--leader has no effect without the number of nodes"),
        ("local", NodeOptions(2, 0, "a:1"), {}, "--nodes is for a run that is started on each node, but `launcher` is"),
        ("ray", NodeOptions(2, 0), {}, "--node is for a run that is started on each node, but `launcher` is ray"),
        ("auto", NodeOptions(), TORCHRUN | {"RANK": "x"}, "the variable RANK: expected a number, found 'x'"),
        ("auto", NodeOptions(), TORCHRUN | {"MASTER_ADDR": ""}, "the variable MASTER_ADDR is not set"),
        ("auto", NodeOptions(), {"RANK": "0", "WORLD_SIZE": "2"}, "the variable MASTER_PORT is not set"),
        ("auto", NodeOptions(), TORCHRUN | {"RANK": "8"}, "expected a command from 0 to 7, found 8"),
        ("auto", NodeOptions(), SRUN | {"SLURM_PROCID": "4"}, "Slurm's variables: expected a command from 0 to 3"),
        ("auto", NodeOptions(), TORCHRUN | {"MASTER_PORT": "65535"}, "MASTER_PORT: expected a port of up to"),
        ("auto", NodeOptions(), SRUN | {"SLURM_STEP_NODELIST": "n[1"}, "SLURM_NODELIST: expected the names of hosts"),
        ("auto", NodeOptions(), SRUN | {"SLURM_STEP_NODELIST": "[1]"}, "SLURM_NODELIST: expected the names of hosts"),
    ],
)
def test_what_cannot_be_is_said(launcher: str, options: NodeOptions, environ: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        attached(launcher, options, environ)
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["", "a", ":1", "a:", "a:0", "a:65536", "a:-1", "a:1x"])
def test_a_leader_is_a_host_and_a_port(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        leader_of(text)
