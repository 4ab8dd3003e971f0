"""The machines of a run: those that have joined the command that leads, or this one alone."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from plait.cost.hardware import Link
from plait.launch.local import LocalNode
from plait.launch.machine import hardware
from plait.launch.node import Node
from plait.launch.nodes.agent import BEAT_S, who
from plait.launch.nodes.gathered import Gathered, ended_by
from plait.launch.nodes.gathering import NODE_SILENT_S, NodeRendezvous
from plait.launch.nodes.interfaces import interface_variables, resolved
from plait.launch.nodes.introduction import listening
from plait.launch.nodes.place import Attached
from plait.launch.nodes.room import Need
from plait.launch.nodes.run_key import leaders_key
from plait.observe.screen import say as say_to_user
from plait.recipes.device_checks import ranks_on_ray
from plait.recipes.plan_files import ranks_of
from plait.recipes.recipe import Recipe
from plait.runtime.folder.node_files import ALONE, given
from plait.runtime.prediction.network import NOT_MEASURED, THIS_ONE, Machines, Network
from plait.runtime.prediction.spending import is_searched
from plait.stop_signals import STOP_SIGNALS

_FEWEST_BEATS = 3
Gathering = Callable[[Recipe, Path, Callable[[str], None]], AbstractContextManager[Gathered | None]]
"""Recipe and folder of a run, and what says how far it is → the nodes that the run is on while inside; None: this
machine alone."""


@contextmanager
def gathered_nodes(
    recipe: Recipe,
    folder: Path,
    say: Callable[[str], None],
    *,
    attached: Attached | None = None,
    num_nodes: int = 0,
) -> Iterator[Gathered | None]:
    """The nodes of a run while inside; at its end they are told how it ended, and leave. None: this machine alone.

    Args:
        folder: of the run.
        attached: the part of this command in a run of several, which it leads.
        num_nodes: that Ray is to give, where that is the launcher; 0: as few as have room.

    Raises:
        ConfigError: the address is none of this machine, the nodes do not share the folder, or have other versions; or
            Ray is to start them, and cannot.
        RunError: nodes have not come in time.
    """
    if attached is not None:
        with commands_joined({ALONE: recipe}, attached, folder, say) as gathered:
            yield gathered
        return
    if recipe.launcher != "ray":
        yield None
        return
    from plait.launch.nodes.on_ray import started_by_ray

    need, key, silence_s = _need(recipe, num_nodes), secrets.token_bytes(32), silent_after_s([recipe])
    with started_by_ray(need, key, silent_after_s=silence_s, say=say) as gathered, _ended(gathered):
        gathered.check_folder(folder.resolve())
        yield gathered


@contextmanager
def commands_joined(
    recipes: Mapping[str, Recipe], attached: Attached, folder: Path, say: Callable[[str], None]
) -> Iterator[Gathered]:
    """The nodes of all commands of a run, of which this one leads, while inside; see `gathered_nodes`.

    Args:
        recipes: as of `node_files.given`.
    """
    address = resolved(attached.leader[0])
    own = address if attached.address is None else resolved(attached.address)
    variables = interface_variables(own, os.environ, "--leader" if attached.address is None else "--address")
    place = LocalNode(own, variables, own_devices=attached.own_devices)
    # Who listens there is alone: the key of another leader in the same folder stays as it is.
    with listening(address, attached.leader[1]) as listener, leaders_key(folder, os.environ) as key:
        if (unreached := said_of_loopback(attached.leader[0], address, attached.num_nodes)) is not None:
            say(unreached)
        say(
            f"waiting for {attached.tasks - 1} more command{'s' * (attached.tasks > 2)} of this run (by {attached.by}) "
            f"at {attached.leader[0]}:{attached.leader[1]}"
        )
        me = who(0, 0, own, own_devices=attached.own_devices, **given(recipes)._asdict())
        tasks, silence_s = range(1, attached.tasks), silent_after_s(list(recipes.values()))
        coming = NodeRendezvous(listener, key, tasks, me, silence_s, say, wished=interrupt_command, missed=said_at_once)
        with _ended(coming.wait(place)) as gathered:
            for path in dict.fromkeys((folder.resolve(), folder.absolute())):  # ranks work in this command's folder
                gathered.check_folder(path)
            yield gathered


@contextmanager
def _ended(gathered: Gathered) -> Iterator[Gathered]:
    """At the end the nodes are told how the run ended, and leave; where one is asked to stop the run meanwhile, and
    nobody else hears of it, this command is interrupted."""
    try:
        with gathered.wishes_to(interrupt_command):
            yield gathered
    except BaseException as error:
        gathered.end(*ended_by(error))
        raise
    gathered.end(0)


def said_at_once(text: str) -> None:
    """Say it from any thread: what is being prepared may take minutes, and ends for it only then."""
    say_to_user(text, file=sys.stderr)


def interrupt_command() -> None:
    """Interrupt what this command does, as Ctrl-C would."""
    heeded = [number for number in STOP_SIGNALS if callable(signal.getsignal(number))]
    if heeded:
        os.kill(os.getpid(), heeded[0])


def silent_after_s(recipes: Sequence[Recipe]) -> float:
    """Silence after which a node of these runs counts as lost: as of a rank, but no less than a few heartbeats of a
    node."""
    return max(_FEWEST_BEATS * BEAT_S, min(NODE_SILENT_S, *(recipe.freeze_after_s for recipe in recipes)))


def placed_on(recipe: Recipe, nodes: Gathered | None) -> tuple[Recipe, Machines]:
    """A recipe that says on how many devices it runs, and the machines that these are of.

    Args:
        nodes: that have joined; None: none has, and Ray, if that is the launcher, is not asked yet.

    Raises:
        ConfigError: Ray is to be asked, and nothing says for how many devices.
    """
    if nodes is None:
        if recipe.launcher == "ray":
            ranks_on_ray(recipe)
        return recipe, THIS_ONE
    if recipe.devices == 0 and ranks_of(recipe.plan) == 0:
        recipe = recipe.model_copy(update={"devices": devices_of(recipe, nodes.nodes)})
    network = network_of(nodes) if is_searched(recipe) else NOT_MEASURED
    return recipe, Machines(nodes.num_nodes, network, alike=said_of_kinds(nodes, recipe.device) is None)


def network_of(nodes: Gathered | None) -> Network:
    """What was found of the machines that have joined, for a plan that is to be found."""
    reach = None if nodes is None or nodes.num_nodes == 1 else nodes.reach()
    if nodes is None or reach is None:
        return NOT_MEASURED
    return Network(Link(reach.bytes_per_s, reach.latency_s), nodes.least_memory)


def said_of_kinds(nodes: Gathered, device: str) -> str | None:
    """Which machines that have joined are of another kind than this one, as which a plan that is to be found takes
    all; None: none is, as far as they say it.

    Args:
        device: of the recipe.
    """
    own = dict(hardware()).get(device)
    others = {link.name: dict(link.joined.hardware).get(device) for link in nodes.links}
    unlike = [f"{name} has {kind}" for name, kind in others.items() if kind not in (None, own)]
    if own is None or not unlike:
        return None
    return (
        f"`plan` auto takes all machines of the run to be as this one is ({own}), but {', '.join(unlike)}; to count "
        "each as what it is, find the plan by a cluster file that lists them (`plait plan RECIPE --cluster FILE --out "
        "plan.json`), and set `plan` to it"
    )


def said_of_loopback(host: str, address: str, num_nodes: int) -> str | None:
    """What a person should know where the leader's host is this machine for itself alone, as many a machine's own name
    is (127.0.1.1 in /etc/hosts); None: it is not, or was named so."""
    if num_nodes == 1 or not address.startswith("127.") or host == "localhost" or host.startswith("127."):
        return None
    return (
        f"{host} is {address} on this machine, by which no other machine can join; if others are to, give the address "
        "that they reach this one by, with --leader on each node"
    )


def devices_of(recipe: Recipe, nodes: Sequence[Node]) -> int:
    """Ranks of a run that does not say how many: one for each device of the nodes, or on the CPU one for each node."""
    if recipe.device == "cpu":
        return len(nodes)
    by_node: dict[int, list[Node]] = {}
    for node in nodes:
        by_node.setdefault(node.node, []).append(node)
    return sum(
        sum(node_there.devices for node_there in places)
        if places[0].own_devices
        else max(node_there.devices for node_there in places)
        for places in by_node.values()
    )


def threads_of(recipe: Recipe, num_ranks: int, nodes: Sequence[Node]) -> int:
    """Compute threads of each rank: as many as the recipe says, else as its node has cores for all its ranks. The same
    on all nodes: the number of threads has a say in the bits."""
    if recipe.threads:
        return recipe.threads
    share = max(1, num_ranks // len(nodes))  # ranks that cannot be divided so are refused where they are started
    places_beside = [sum(other.node == node.node for other in nodes) for node in nodes]
    return max(1, min(node.cores // (share * count) for node, count in zip(nodes, places_beside, strict=True)))


def _need(recipe: Recipe, num_nodes: int) -> Need:
    """What a run asks of a Ray cluster. Raises ConfigError where nothing says how many ranks it has."""
    cores = {"CPU": float(recipe.threads or 1)}
    return Need(ranks_on_ray(recipe), {"GPU": 1.0, **cores} if recipe.device == "cuda" else cores, num_nodes)
