"""The checkpoints of a run: written atomically, checked when read, pruned to the last few.

    checkpoints/
        step-12/                  appears by one rename, when all of it is on disk
            tensors.safetensors   tensors that the leader saved; in early versions all, of a run on one rank
            NAME-*.safetensors    what each rank saved, and
            NAME.layout.json      which file has which part of what
            state.json            everything else
            manifest.json         length and CRC-32 of all of them
            speculation.json      how often engines' drafts were accepted; it may be missing (guesses.json once)
        step-13.tmp/              being written, or left by a killed process: ignored, then removed
        step-12.replaced/         while step 12 is saved a second time; counts as step 12 until that one stands

A process may be killed, or the machine fall, at any moment: `latest` finds the last one that was finished.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from plait.checkpoint.digests import digest_of_size, write_durably
from plait.checkpoint.step_folders import steps_in
from plait.errors import RESUME, RunError
from plait.file_writes import why_not_written
from plait.json_text import parse
from plait.models.files.tensor_file import FileDigest, TensorEntry, file_bytes, write_tensor_file
from plait.output import sync

_TENSORS, _STATE, _MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
_FORMAT = 1
_DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

Kind = TypeVar("Kind")
WriteParts = Callable[[Path], tuple[dict[str, FileDigest], dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint: its files have the lengths and checksums that its manifest states.

    state: what was saved, with tuples read back as lists.
    """

    step: int
    folder: Path
    state: dict[str, Any]

    def tensors(self) -> dict[str, Tensor]:
        """Read the tensors, each in the shape and dtype that `save` was given, on the CPU. They map the file privately:
        copy what is to outlive the checkpoint.

        Raises:
            RunError: the file cannot be read as safetensors.
        """
        try:
            return load_file(self.folder / _TENSORS)
        except SafetensorError as error:
            raise RunError(f"{self.folder / _TENSORS} cannot be read: {error}") from error

    @property
    def tensors_path(self) -> Path:
        return self.folder / _TENSORS

    def stated(self, key: str, kind: type[Kind]) -> Kind:
        """What the state has under `key`.

        Raises:
            RunError: nothing, or something of another kind, though all bytes are as they were written.
        """
        value = self.state.get(key)
        if not isinstance(value, kind):
            raise RunError(
                f"{self.folder / _STATE}: expected a {kind.__name__} under `{key}`, found {value!r:.60}; "
                "it was written by another version of plait, or changed since"
            )
        return value


class CheckpointStore:
    """The folder `folder` of a run's checkpoints; keeps the `keep_last` newest."""

    def __init__(self, folder: str | Path, *, keep_last: int) -> None:
        assert keep_last >= 1, f"keep_last is {keep_last}; the newest checkpoint is always kept"
        self.folder = Path(folder)
        self._keep_last = keep_last

    def save(
        self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], write_parts: WriteParts | None = None
    ) -> Path:
        """Write the checkpoint of `step`, prune, and return its folder.

        write_parts: writes further files into the folder that it is given, in which nothing else is yet, and returns
        the digests of those without which the checkpoint is not whole, and what is added to `state`.

        tensors: any shapes, devices and dtypes of `_DTYPE_NAMES`; read one after the other, with no copy of those
        that are contiguous on the CPU. state: JSON values with string keys; floats come back bit by bit, NaN and
        infinities too.

        Raises:
            RunError: the file system refuses it, such as a full disk; nothing of this checkpoint is left, the
                earlier ones are untouched.
        """
        entries = [TensorEntry(name, _DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()]
        state_bytes = _encode_state(state)
        final, unfinished = self._path(step), self._path(step, ".tmp")
        parts: dict[str, FileDigest] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            unfinished.mkdir()
            if write_parts is not None:
                parts, added = write_parts(unfinished)
                state_bytes = _encode_state({**state, **added})
            digests = parts | {
                _TENSORS: write_tensor_file(
                    unfinished / _TENSORS, entries, lambda entry: _bytes_of(tensors[entry.name])
                ),
                _STATE: write_durably(unfinished / _STATE, state_bytes),
            }
            files = {name: asdict(digest) for name, digest in digests.items()}
            manifest = json.dumps({"format": _FORMAT, "step": step, "files": files}, indent=1)
            write_durably(unfinished / _MANIFEST, manifest.encode())
            sync(unfinished)
            if final.exists():  # a damaged one, or the same step saved twice
                shutil.rmtree(self._path(step, ".replaced"), ignore_errors=True)
                os.rename(final, self._path(step, ".replaced"))
            os.rename(unfinished, final)
            sync(self.folder)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            needed_bytes = file_bytes(entries) + len(state_bytes) + sum(part.size_bytes for part in parts.values())
            raise RunError(self._refusal(step, error, needed_bytes)) from error
        except RunError as error:  # of a part
            shutil.rmtree(unfinished, ignore_errors=True)
            raise RunError(f"the checkpoint of step {step}: {error}; {self._good()}") from error
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        with contextlib.suppress(OSError):  # the checkpoint stands; what is wrong with the disk the next save says
            self._remove_leftovers()
            self._prune()
        return final

    def latest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint; None when there is none. Damaged ones are passed over (`steps` has them).

        Raises:
            RunError: there are checkpoints and all are damaged, so that going on would begin from nothing.
        """
        newest = self._newest_whole()
        if newest is None and (damaged := self.steps()):
            raise RunError(
                f"no checkpoint in {self.folder} is whole: step {', '.join(map(str, damaged))} damaged, though "
                "each was finished once. Put a copy back, or start over (another `run_dir`, or `overwrite: true`)."
            )
        return newest

    def _newest_whole(self) -> Checkpoint | None:
        return next((checkpoint for step in reversed(self.steps()) if (checkpoint := self._read(step))), None)

    def at(self, step: int) -> Checkpoint:
        """Return the checkpoint of `step`.

        Raises:
            RunError: there is none, or it is damaged.
        """
        checkpoint = self._read(step)
        if checkpoint is None:
            whole = [other for other in self.steps() if self._read(other)]
            raise RunError(
                f"{self._path(step)} is {'damaged' if self._where(step).exists() else 'not there'}; "
                f"whole checkpoints: {', '.join(f'step {other}' for other in whole) or 'none'}"
            )
        return checkpoint

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint folder, ascending; whether each is whole is not checked."""
        return steps_in(self.folder)

    def discard_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, which a run that goes on from `step` writes anew."""
        for later in (other for other in self.steps() if other > step):
            self._remove(later)

    def _path(self, step: int, suffix: str = "") -> Path:
        return self.folder / f"step-{step}{suffix}"

    def _where(self, step: int) -> Path:
        """The folder that counts as the checkpoint of `step`."""
        folder = self._path(step)
        return folder if folder.exists() else self._path(step, ".replaced")

    def _read(self, step: int) -> Checkpoint | None:
        folder, manifest = self._where(step), self._manifest(step)
        if manifest.get("format") != _FORMAT or manifest.get("step") != step:
            return None
        try:
            for name in {_TENSORS, _STATE, *manifest["files"]}:
                stated = FileDigest(**manifest["files"][name])
                if Path(name).name != name or digest_of_size(folder / name, stated.size_bytes) != stated:
                    return None
            state = parse((folder / _STATE).read_bytes(), finite=False)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return Checkpoint(step, folder, state) if isinstance(state, dict) else None

    def _manifest(self, step: int) -> dict[str, Any]:
        """The manifest of `step`; empty when it cannot be read."""
        try:
            manifest = parse((self._where(step) / _MANIFEST).read_bytes())
        except (OSError, ValueError):
            return {}
        return manifest if isinstance(manifest, dict) else {}

    def _prune(self) -> None:
        for step in self.steps()[: -self._keep_last]:
            self._remove(step)

    def _remove(self, step: int) -> None:
        """Renamed first, so that a kill on the way leaves no half-removed checkpoint under a valid name."""
        if self._path(step).exists():
            shutil.rmtree(self._path(step, ".replaced"), ignore_errors=True)
        doomed = self._path(step, ".old.tmp")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(self._where(step), doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        for path in self.folder.glob("step-*.tmp"):
            shutil.rmtree(path)
        for path in self.folder.glob("step-*.replaced"):
            if path.with_suffix("").exists():
                shutil.rmtree(path)

    def _good(self) -> str:
        last = self._newest_whole()
        return f"the last good one is step {last.step}, {last.folder}" if last else "there is no earlier one"

    def _refusal(self, step: int, error: OSError, needed_bytes: int) -> str:
        why = why_not_written(self._path(step), error)
        return (
            f"the checkpoint of step {step} cannot be written to {self.folder}: {why}; it needs "
            f"{needed_bytes / 2**20:.1f} MiB; {self._good()}. Mend that, then go on with {RESUME}; a lower "
            "`checkpoint.keep_last` takes less"
        )


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's bytes: of its own memory where it is contiguous on the CPU, else of a copy of this one tensor."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _encode_state(state: Mapping[str, Any]) -> bytes:
    _check_plain(state, "state")
    return json.dumps(state, indent=1).encode()


def _check_plain(value: Any, where: str) -> None:
    """JSON must give back what went in: no other types, no keys but strings (JSON would turn 1 into "1")."""
    match value:
        case Mapping():
            assert isinstance(value, dict), f"{where} is a {type(value).__name__}; a checkpoint's state holds dicts"
            for key, item in value.items():
                assert isinstance(key, str), f"{where} has the key {key!r}; a checkpoint's state has string keys"
                _check_plain(item, f"{where}.{key}")
        case list() | tuple():
            for index, item in enumerate(value):
                _check_plain(item, f"{where}[{index}]")
        case _:
            assert value is None or type(value) in (bool, int, float, str), (
                f"{where} is a {type(value).__name__}; a checkpoint's state holds JSON values (tensors go apart)"
            )
