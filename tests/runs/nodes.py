"""`plait train` begun on several "nodes" of this machine: commands that find each other over loopback."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.recipes.recipe import Recipe
from plait.runtime.folder.stored_recipe import recipe_text

LIMIT_S = 240


@dataclass(frozen=True)
class Ended:
    code: int
    text: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def begin(
    recipe: Recipe,
    number: int,
    options: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    before: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """One command of a run, in a folder that shows what it has started.

    Args:
        number: of the node, for the file of its recipe.
        before: a command that runs it.
    """
    path = recipe.run_dir.with_suffix(f".{number}.yaml")
    path.write_text(recipe_text(recipe))
    command = [*before, sys.executable, "-m", "plait", "train", str(path), *options]
    return started(command, environment or {}, folder_of(recipe.run_dir))


def folder_of(run_dir: Path) -> Path:
    """In which the commands of a run are given, and nothing else works."""
    (folder := _folder(run_dir)).mkdir(parents=True, exist_ok=True)
    return folder


def _folder(run_dir: Path) -> Path:
    return run_dir.resolve().parent / "given in" / run_dir.name


def started(
    command: Sequence[str], environment: Mapping[str, str], folder: Path | None = None
) -> subprocess.Popen[str]:
    """A command with these variables over ours; what it prints, on stderr too, is piped."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ends(commands: Sequence[subprocess.Popen[str]], limit_s: float = LIMIT_S) -> list[Ended]:
    """How each ended; none is left."""
    try:
        texts = [command.communicate(timeout=limit_s)[0] for command in commands]
        return [Ended(command.returncode, text) for command, text in zip(commands, texts, strict=True)]
    finally:
        for command in commands:
            command.kill()
            command.communicate()


def begin_nodes(recipe: Recipe, nodes: int, *options: str) -> list[subprocess.Popen[str]]:
    """As a user would begin them by hand."""
    leader = f"127.0.0.1:{free_port()}"
    return [
        begin(recipe, node, ["--nodes", str(nodes), "--node", str(node), "--leader", leader, *options])
        for node in range(nodes)
    ]


def left_of(run_dir: Path) -> list[str]:
    """Processes that work where the commands of a run were given, or carry its mark, `PLAIT_MARK`."""
    mark, where, left = f"PLAIT_MARK={run_dir}".encode(), str(_folder(run_dir)), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "cwd") == where or mark in (process / "environ").read_bytes().split(b"\0"):
                left.append(process.name)
    return left


def process_of(run_dir: Path, rank: int) -> int:
    """The process that writes a rank's log."""
    log = str((run_dir / "workers" / f"rank{rank}.log").resolve())
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(folder / "fd" / "1") == log:
                return int(folder.name)
    raise AssertionError(f"no process writes {log}")


def wait_for(path: Path, commands: Sequence[subprocess.Popen[str]]) -> None:
    """Until a run has written a file; its commands are ended where it does not."""
    end = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > end or any(command.poll() is not None for command in commands):
            for command in commands:
                command.kill()
            raise AssertionError(f"{path} was not written: {[command.communicate()[0] for command in commands]}")
        time.sleep(0.05)
