"""What is said of the machines that have joined a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from plait.launch import machine
from plait.launch.machine import cpu_cores, cpu_flags, cpu_name, hardware
from plait.launch.nodes.gathered import Gathered
from plait.launch.nodes.place import Attached
from plait.recipes.recipe import Recipe
from plait.runtime.folder.node_files import Given
from plait.runtime.processes import nodes
from plait.runtime.processes.nodes import gathered_nodes, said_of_kinds, silent_after_s, threads_of

CPU = ("cpu", "a CPU")


def gathered(*kinds: tuple[tuple[str, str], ...]) -> Gathered:
    links = [
        SimpleNamespace(
            name=f"node {number} (host)", node=number, joined=SimpleNamespace(hardware=kind, task=number), gone=""
        )
        for number, kind in enumerate(kinds, start=1)
    ]
    return Gathered(links, None)  # pyright: ignore[reportArgumentType]


def test_machines_of_another_kind_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "hardware", lambda: (CPU, ("cuda", "NVIDIA H100")))
    of = gathered((CPU, ("cuda", "NVIDIA H100")), (CPU, ("cuda", "NVIDIA A100")), (CPU,))
    said = said_of_kinds(of, "cuda")
    assert said is not None
    assert "as this one is (NVIDIA H100), but node 2 (host) has NVIDIA A100; to count each as what it is" in said
    assert said_of_kinds(of, "cpu") is None, "their processors are alike"
    assert said_of_kinds(gathered(()), "cpu") is None, "it does not say"


def test_a_leader_that_has_only_a_name_of_its_own_for_itself_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(nodes, "NodeRendezvous", lambda *_, **__: SimpleNamespace(wait=lambda place: gathered()))
    monkeypatch.setattr(nodes, "given", lambda _: Given((), ()))
    for host, count in (("node0", 2), ("node0", 1), ("localhost", 2), ("127.0.0.1", 2)):
        monkeypatch.setattr(nodes, "resolved", lambda _: "127.0.1.1")
        place = Attached(0, 2, 0, (host, 0), None, "--node", nodes=count)
        with gathered_nodes(Recipe.model_construct(), tmp_path, said.append, attached=place):
            pass
    assert [line.startswith("node0 is 127.0.1.1 on this machine") for line in said] == [True, *[False] * 4]


@pytest.mark.parametrize(("freeze_after_s", "silence_s"), [((30.0,), 15.0), ((30.0, 5.0), 5.0), ((1.0,), 3.0)])
def test_a_node_is_not_lost_between_two_of_its_heartbeats(freeze_after_s: tuple[float, ...], silence_s: float) -> None:
    """They come every second, and before there are ranks nothing else does."""
    assert silent_after_s([Recipe.model_construct(freeze_after_s=one) for one in freeze_after_s]) == silence_s


@pytest.mark.parametrize(("num_ranks", "threads"), [(8, 2), (4, 4), (2, 4), (3, 4)])
def test_threads_of_ranks_on_nodes_of_two_places_each(num_ranks: int, threads: int) -> None:
    """Eight cores for the ranks of a node. Too few ranks for the places are refused where they are started, by name."""
    recipe = Recipe.model_construct(threads=0)
    places = [SimpleNamespace(node=node, cores=8) for node in (0, 0, 1, 1)]
    assert threads_of(recipe, num_ranks, places) == threads  # pyright: ignore[reportArgumentType]


def test_gpus_are_named_as_the_driver_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, model in enumerate(("NVIDIA H100", "NVIDIA A100", "NVIDIA H100")):
        (tmp_path / f"000{number}").mkdir()
        (tmp_path / f"000{number}" / "information").write_text(f"Model: \t\t {model}\nIRQ:   16\n")
    monkeypatch.setattr(machine, "GPUS", tmp_path)
    assert dict(hardware())["cuda"] == "NVIDIA A100 and NVIDIA H100"
    monkeypatch.setattr(machine, "GPUS", tmp_path / "none")
    assert list(dict(hardware())) == ["cpu"]


def test_a_processor_is_what_linux_says_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sockets of two cores, each of which runs two threads: four cores."""
    file = tmp_path / "cpuinfo"
    places = [(socket, core) for socket in range(2) for core in range(2)] * 2
    one = "model name\t: A CPU @ 2.0: GHz\nflags\t\t: fma avx2\nphysical id\t: {}\ncore id\t\t: {}\n"
    file.write_text("\n".join(one.format(*place) for place in places))
    monkeypatch.setattr(machine, "CPUS", file)
    assert (cpu_name(), cpu_flags(), cpu_cores()) == ("A CPU @ 2.0: GHz", {"fma", "avx2"}, 4)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 3)
    file.write_text("processor\t: 0\nFeatures\t: asimd\n\nprocessor\t: 1\nFeatures\t: asimd\n")
    assert (cpu_flags(), cpu_cores()) == (frozenset(), 3)
    monkeypatch.setattr(machine, "CPUS", tmp_path / "none")
    assert (cpu_flags(), cpu_cores()) == (frozenset(), 3)
