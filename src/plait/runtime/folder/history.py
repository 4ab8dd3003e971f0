"""How a run came to be: RUN_DIR/run.json has each stay at it (a start or a resume), RUN_DIR/code what it ran.

A stay: when it began and ended, and how; after which error, if the run went on by itself; the steps that it did; the
command, the versions, the machine, a digest of the plan; the keys that steer it (`STEERED_KEYS`); of each file of the
user's that it ran (flow, rewards, functions of evaluations, the recipe as it was given) the path, the SHA-256 and a
copy; and of each local data file and model the path and a digest. Files that the code imports are not among them.
`saved_step` is the newest step that a checkpoint was ever written of.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.machinery
import json
import os
import platform
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any

from plait.errors import DataError
from plait.file_form import FileForm
from plait.output import write_file
from plait.paths import working_folder
from plait.recipes.recipe import Recipe
from plait.recipes.trust import code_of
from plait.runtime.folder.named_inputs import digest_of, named_inputs, said_of_reading
from plait.runtime.folder.stored_recipe import said_of_steering, steering
from plait.schedule.plan import Plan

HISTORY, CODE = "run.json", "code"
FORM = FileForm("run")
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "numba", "peft")
FINISHED, STOPPED = "finished", "stopped"
"""How a stay ends whose measurements are then counted; any other says its error, or nothing after a kill."""
_COPIED_BYTES = 1 << 20
"""A larger file is known by its hash alone."""


@dataclass(frozen=True)
class Restart:
    """Why a run has gone on by itself: number `number` of `most`, after `error`."""

    number: int
    most: int
    error: str


@dataclass(frozen=True)
class Origin:
    """What began a stay, as the process that the user started knows it."""

    command: tuple[str, ...]
    folder: str
    """In which the command was given; relative paths are from there."""
    recipe_file: Path | None = None
    restart: Restart | None = None

    @classmethod
    def here(cls, recipe_file: Path | None = None) -> Origin:
        """What this process knows of itself. Raises ConfigError where its folder is gone."""
        return cls(tuple(sys.argv), working_folder(), recipe_file)


class History:
    """The file of a run's folder. With `resume` it is read; `begin` adds this stay.

    Raises:
        DataError: it is damaged.
    """

    def __init__(self, folder: Path, *, resume: bool) -> None:
        self._folder = folder
        self._path = folder / HISTORY
        self.saved_step = 0
        self.files_changed = False  # of code or data, since the stay before; known from `begin` on
        self.stays: list[dict[str, Any]] = []
        if resume and self._path.exists():
            self._read()

    @property
    def comparable_from(self) -> int:
        """Steps after this one were done by the plan and on the machine of the newest stay, so that what they took can
        be compared. Stays that do not say their plan, as older versions wrote them, count as of another."""
        return min(stay["from_step"] for stay in self._comparable())

    @property
    def uncounted(self) -> list[int]:
        """The steps after which stays began whose own are comparable and in no profile yet, rising: stays that finished
        or stopped have put theirs there."""
        newest, *earlier = self._comparable()
        uncounted = takewhile(lambda stay: stay.get("how") not in (FINISHED, STOPPED), earlier)
        return sorted(stay["from_step"] for stay in (newest, *uncounted))

    def _comparable(self) -> list[dict[str, Any]]:
        """Stays with the plan and machine of the newest, back from it."""
        newest, *earlier = reversed(self.stays)
        return [newest, *takewhile(lambda stay: "plan" in stay and _setting(stay) == _setting(newest), earlier)]

    def plan_of(self, step: int) -> str | None:
        """Digest of the plan that a step was done by, the last time that it was done; None: no stay says it."""
        return next((stay.get("plan") for stay in reversed(self.stays) if stay["from_step"] < step), None)

    def begin(
        self, origin: Origin, recipe: Recipe, plan: Plan, from_step: int, tell: Callable[[str], None]
    ) -> list[str]:
        """Write that a stay begins. Returns what a person should know of keys, files and packages that are others than
        in the stay before.

        Args:
            tell: is given a line where large files are read.

        Raises:
            OSError: the folder cannot be written, or a file of code cannot be read.
        """
        code = [self._kept(key, path) for key, path in code_files(recipe, origin).items()]
        named = named_inputs(recipe)
        if (line := said_of_reading(named)) is not None:
            tell(line)
        inputs = [{"key": key, "path": str(path), "sha256": _digest(path)} for key, path in named.items()]
        last = self.stays[-1] if self.stays else {}
        changed = [
            *_changed(last.get("inputs", []), inputs, "key"),
            *_changed(last.get("code", []), code, "key", "path"),
        ]
        self.files_changed = bool(changed)
        stay = {
            "started": _now(),
            "ended": None,
            "how": None,
            "from_step": from_step,
            "to_step": from_step,
            "command": list(origin.command),
            "folder": origin.folder,
            "process": os.getpid(),
            "machine": {"host": socket.gethostname(), "system": platform.platform(), "cores": os.cpu_count()},
            "plan": plan_digest(plan),
            "steering": steering(recipe),
            "versions": versions(),
            "code": code,
            "inputs": inputs,
        }
        if origin.restart is not None:
            stay["restart"] = vars(origin.restart)
        self.stays.append(stay)
        self._write()
        kept_in = self._folder / CODE
        return [
            *_other_versions(last.get("versions"), stay["versions"]),
            *said_of_steering(last.get("steering", {}), stay["steering"], from_step + 1),
            *(
                f"`{file['key']}`: {file['path']} is another than when this run was last worked on, and so may be what "
                f"its rows mean from here on{f'; both are in {kept_in}' if 'copy' in file else ''}"
                for file in changed
            ),
        ]

    def saved(self, step: int) -> None:
        """A checkpoint of a step is on disk."""
        self.saved_step = step
        self._update(to_step=step)

    def end(self, how: str, step: int | None = None) -> None:
        """This stay is over, after a step; None: as was noted, or after the newest that was saved. An error takes the
        place of one that was noted before: who watches the processes of a run knows what came first."""
        if self.stays and self.stays[-1].get("how") not in (FINISHED, STOPPED):
            self._update(ended=_now(), how=how, **({} if step is None else {"to_step": step}))

    def _update(self, **changes: Any) -> None:
        if self.stays:
            self.stays[-1] |= changes
            with contextlib.suppress(OSError):  # what a full disk means is said by what needs it
                self._write()

    def _write(self) -> None:
        record = {**FORM.head, "saved_step": self.saved_step, "stays": self.stays}
        write_file(self._path, json.dumps(record, indent=1) + "\n")

    def _read(self) -> None:
        record = FORM.read(self._path)
        step, stays = record.get("saved_step"), record.get("stays")
        whole = type(step) is int and isinstance(stays, list) and all(_is_stay(stay) for stay in stays)
        if not whole:
            raise DataError(f"{self._path}: expected the stays of a run; it is damaged, put a copy back or remove it")
        self.saved_step, self.stays = record["saved_step"], record["stays"]

    def _kept(self, key: str, path: Path) -> dict[str, Any]:
        """What is noted of a file; its content is copied, under a name that other contents do not have."""
        content = path.read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        copy = f"{sha256[:8]}-{path.name}" if len(content) <= _COPIED_BYTES else None
        if copy is not None and not (self._folder / CODE / copy).exists():
            (self._folder / CODE).mkdir(exist_ok=True)
            write_file(self._folder / CODE / copy, [content])
        return {"key": key, "path": str(path), "sha256": sha256, "copy": copy and f"{CODE}/{copy}"}


def code_files(recipe: Recipe, origin: Origin) -> dict[str, Path]:
    """Key → file of the user's that it names, as far as it can be found without importing anything; of a key with
    several functions, `key[0]` and so on; the recipe's own under `recipe`."""
    files: dict[str, Path] = {}
    for key, names in code_of(recipe).items():
        for place, name in enumerate(names):
            module = name.rpartition(":")[0] or name.rpartition(".")[0]
            path = Path(module) if module.endswith(".py") else _module_file(module)
            if path is not None and path.is_file():
                files[key if len(names) == 1 else f"{key}[{place}]"] = path.resolve()
    if origin.recipe_file is not None and origin.recipe_file.is_file():
        files["recipe"] = origin.recipe_file.resolve()
    return files


def plan_digest(plan: Plan) -> str:
    """The same for plans that run alike: neither the name nor the prediction is in it."""
    return hashlib.sha256(replace(plan, name="", predicted=None).to_json().encode()).hexdigest()


@cache
def versions() -> Mapping[str, str]:
    """Versions of Python, plait, and of the packages that a result depends on and that are there."""
    from plait import __version__

    installed = {"python": platform.python_version(), "plait": __version__}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def _module_file(name: str) -> Path | None:
    """The file of a module, found on the path as an import would, none of its packages imported."""
    folders: Any = None
    spec = None
    for part in name.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, folders)
        if spec is None:
            return None
        folders = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.origin else None


def _digest(path: Path) -> str | None:
    """None: it cannot be read any more, so nothing is known of it. No run ends for that."""
    try:
        return digest_of(path)
    except OSError:
        return None


def _changed(before: list[dict[str, Any]], now: list[dict[str, Any]], *same: str) -> list[dict[str, Any]]:
    """Those of the files that had another content where these fields were the same."""
    known = {tuple(file[name] for name in same): file["sha256"] for file in before}
    found = [(file, known.get(tuple(file[name] for name in same))) for file in now]
    return [file for file, digest in found if None not in (digest, file["sha256"]) and digest != file["sha256"]]


def _other_versions(before: Any, now: Mapping[str, str]) -> list[str]:
    """A line that names the packages whose version has changed; no line if none has, or if none were recorded."""
    known = before if isinstance(before, dict) else {}
    others = [f"{name} ({known[name]} then, {new} now)" for name, new in now.items() if known.get(name, new) != new]
    if not others:
        return []
    return [
        f"{', '.join(others)}: another version than when this run was last worked on, so its steps from here on may be "
        "others than they would have been"
    ]


def _setting(stay: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the seconds and bytes of its steps depend on."""
    return stay.get("plan"), stay.get("machine")


def _is_stay(stay: Any) -> bool:
    """Whether it is one; the first versions wrote no inputs."""
    return (
        isinstance(stay, dict)
        and type(stay.get("from_step")) is int
        and isinstance(stay.get("how"), str | None)
        and _are_files(stay.get("code"))
        and _are_files(stay.get("inputs", []))
    )


def _are_files(files: Any) -> bool:
    return isinstance(files, list) and all(
        isinstance(file, dict) and {"key", "path", "sha256"} <= file.keys() for file in files
    )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
