"""The nodes of a run, once they have joined its leader."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from plait.errors import ConfigError, UserError
from plait.launch.failures import NodeLost
from plait.launch.node import Node
from plait.launch.nodes.echoes import Reach
from plait.launch.nodes.link import NodeLink
from plait.launch.nodes.messages import Note

STOPPED_CODE = 130
"""The exit code of a command that was asked by a signal to stop."""
_SEEN_S = 10.0
"""For a file that one node writes to be seen by another: a network's file systems may be slow in that."""


class Gathered:
    """The nodes of a run."""

    def __init__(self, links: Sequence[NodeLink], own: Node | None) -> None:
        self._links = list(links)
        self._own = own
        self._wished: Callable[[], None] | None = None
        self._ended = False
        self.nodes: list[Node] = []
        """Where ranks are started, in the order of their ranks: machine by machine. One that is lost stays among them,
        and no ranks can be started, until `drop_lost`."""
        self.drop_lost()
        self.num_joined = len(self.nodes)
        """Places of ranks before any was lost."""

    def drop_lost(self) -> None:
        """From now on do without the nodes that are lost: with the most of the others that are equally many on each
        machine, as plans have them."""
        machines = self._machines()
        counts = {len(places) for places in machines}
        sizes = {count: count * sum(len(places) >= count for places in machines) for count in counts}
        best = max(sizes, key=lambda count: (sizes[count], count), default=0)
        self.nodes = [node for places in machines if len(places) >= best for node in places[:best]]

    @property
    def links(self) -> list[NodeLink]:
        """Links to the other nodes that are not lost."""
        return [link for link in self._links if not link.gone]

    @property
    def num_nodes(self) -> int:
        """Machines; several places may be on one."""
        return len({node.node for node in self.nodes})

    def check_equal(self) -> None:
        """Raises ConfigError where machines have different numbers of commands: a plan is for equal ones."""
        machines = self._machines()
        if len({len(places) for places in machines}) > 1:
            raise ConfigError(
                "expected the same number of commands on each node, found "
                + ", ".join(f"{len(places)} on node {places[0].node}" for places in machines)
            )

    def _machines(self) -> list[list[Node]]:
        """All that are not lost: the places of each machine, this process's own first."""
        own: list[Node] = [] if self._own is None else [self._own]
        by_node: dict[int, list[Node]] = {}
        for node in (*own, *sorted(self.links, key=_order)):
            by_node.setdefault(node.node, []).append(node)
        return [by_node[number] for number in sorted(by_node)]

    def check_folder(self, folder: Path) -> None:
        """See that all nodes share a folder: each writes a word there, which is read here.

        Raises:
            ConfigError: one does not; names the node.
            NodeLost: one is gone.
        """
        for link in self.links:
            path, word = folder / f".node-{link.joined.task}-{secrets.token_hex(4)}", secrets.token_hex(16)
            try:
                why = link.touch(path, word)
                if not why and not _seen(path, word):
                    why = "what it writes there is not seen by the leader"
            finally:
                path.unlink(missing_ok=True)
            if link.gone:
                raise NodeLost(f"{link.name} is lost: {link.gone}")
            if why:
                raise ConfigError(
                    f"key `run_dir`: {folder} is not shared by all nodes: on {link.name}: {why}; give a folder on a "
                    "file system that all nodes mount under the same path"
                )

    def reach(self) -> Reach | None:
        """What messages between machines take, of the node that they take longest to; None: it is not known."""
        own = None if self._own is None else self._own.node
        measured = [reach for link in self.links if link.node != own and (reach := link.measure()) is not None]
        if not measured:
            return None
        return Reach(min(reach.bytes_per_s for reach in measured), max(reach.latency_s for reach in measured))

    @property
    def joined_bytes(self) -> dict[str, int]:
        """Name → memory of the machines that have joined."""
        return {link.name: link.joined.memory_bytes for link in self.links}

    @property
    def least_memory(self) -> int | None:
        """Bytes of the machine with least memory, of those that have joined; None: none has."""
        return min(self.joined_bytes.values(), default=None)

    @contextlib.contextmanager
    def wishes_to(self, wished: Callable[[], None] | None) -> Iterator[None]:
        """Within the context, call `wished` when a signal asks a node to stop the run; see `NodeLink.on_wish`.
        Afterwards the callback from before is back."""
        before, self._wished = self._wished, wished
        self._on_wish()
        try:
            yield
        finally:
            self._wished = before
            self._on_wish()

    def _on_wish(self) -> None:
        for link in self._links:
            link.on_wish(self._wished)

    def tell(self, text: str) -> None:
        """Have those who watch the other nodes read a text."""
        for link in self.links:
            link.send(Note(text))

    def end(self, code: int, text: str = "") -> None:
        """Let all nodes leave with an exit code, and say a text there; harmless when done before."""
        if not self._ended:
            self._ended = True
            for link in self._links:
                link.end(code, text)


def ended_by(error: BaseException) -> tuple[int, str]:
    """The exit code of a run that an error ends, and what the other nodes are told."""
    if isinstance(error, KeyboardInterrupt):
        return STOPPED_CODE, "node 0: interrupted"
    return 2 if isinstance(error, UserError) else 1, f"node 0: {str(error) or type(error).__name__}"


def _seen(path: Path, word: str) -> bool:
    end = time.monotonic() + _SEEN_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if path.read_text() == word:
                return True
        time.sleep(0.1)
    return False


def _order(link: NodeLink) -> tuple[int, int]:
    return link.node, link.joined.task
