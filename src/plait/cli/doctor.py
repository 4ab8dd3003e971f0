"""`plait doctor RUN_DIR`: what the doctor of a run has said; `plait doctor engines`: which engines can draw samples."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli.app import Place
from plait.observe.screen import say

if TYPE_CHECKING:
    from plait.runtime.folder.run_files import RunFiles

_ENGINES = Path("engines")
_NO_STEP = "no step has ended yet, so the doctor has found nothing"


def doctor(what: Place, /) -> int:
    """Show what the doctor of a run found, or list the engines of this machine.

    Parameters
    ----------
    what
        Folder of a run: its findings by step, a summary, and how the run ended; a folder of several runs, such as
        stages: how each ended. Or `engines`: which generation engines are installed.
    """
    if what == _ENGINES:
        _say_engines()
    else:
        _say_findings(what)
    return 0


def _say_findings(folder: Path) -> None:
    """Print the doctor's findings and how the run ended; for a folder of several runs, how each of them ended. Raises
    ConfigError if it is no folder of a run."""
    from plait.observe.doctor import Doctor
    from plait.observe.run_log import read_steps
    from plait.runtime.folder.ending import said_of_end
    from plait.runtime.folder.run_files import RunFiles

    files, end = RunFiles(folder), said_of_end(folder)
    if not os.path.isfile(files.doctor):
        if end is None:
            _say_ends(folder)
        else:
            say(f"{_why_silent(files)}\n{end}")
        return
    seen = Doctor()
    for finding in seen.read(files.doctor):
        say(str(finding))
    count = len(read_steps(files.metrics)) if os.path.isfile(files.metrics) else 0
    nothing = f"steps: {count}; the doctor found nothing" if count else _NO_STEP
    say(f"\n{summary}" if (summary := seen.summary_text()) else nothing)
    if end is not None:
        say(f"\n{end}" if summary else end)


def _why_silent(files: RunFiles) -> str:
    """Why a run's folder has nothing of its doctor: that was off, or no step was there yet to look at."""
    from plait.runtime.folder.stored_recipe import had_doctor

    return _NO_STEP if had_doctor(files.recipe) else "its doctor was off (`doctor.enabled`)"


def _why_not_begun(folder: Path) -> str:
    """Why the folder that a command took for a run holds none."""
    from plait.runtime.folder.run_lock import worker_at

    if (worker := worker_at(folder)) is not None:
        return f"{worker} is still loading what it will run; ask again when it has begun"
    return "the command that took it ended while it was loading; give it again, without --resume"


def _say_ends(folder: Path) -> None:
    """How each of the runs in a folder ended. Raises ConfigError: there is none."""
    from plait.errors import ConfigError
    from plait.output import RUN_LOCK
    from plait.runtime.folder.ending import ends_below
    from plait.runtime.folder.run_files import DOCTOR, RunFiles

    ends = ends_below(folder)
    for run, end in ends.items():
        say(f"`{run}`: {end}")
    if ends:
        say("\ngive one of these folders to see what its doctor said")
        return
    runs = ", ".join(f"`{path.parent}`" for path in sorted(folder.glob(f"*/{DOCTOR}")))
    remedy = f"give one of {runs}" if runs else "give the folder of a run, or the word engines"
    if not folder.exists():
        raise ConfigError(f"WHAT: `{folder}` does not exist; {remedy}")
    if os.path.isfile(folder / RUN_LOCK) and not os.path.isfile(RunFiles(folder).recipe):
        raise ConfigError(f"WHAT: `{folder}` holds no run: {_why_not_begun(folder)}")
    remedy = _why_silent(files) if os.path.isfile((files := RunFiles(folder)).recipe) else remedy
    raise ConfigError(f"WHAT: `{folder}` has no {DOCTOR}; {remedy}")


def _say_engines() -> None:
    import torch

    say("plait   is here: it needs nothing else")
    for device in ("cpu", *(("cuda",) if torch.cuda.is_available() else ())):
        _say_vllm(device)


def _say_vllm(device: str) -> None:
    from plait.vllm.environment import TESTED, VARIABLE, install_text, look, vllm_python

    python, environment = vllm_python(device), look(device)
    fault = f"{python} is not a Python that runs" if environment is None else environment.fault(device)
    if environment is not None and not fault:
        say(
            f"vllm    is here for `device` {device}: vLLM {environment.vllm}, torch {environment.torch}, transformers "
            f"{environment.transformers}, in {python}; tokens are a function of the seed"
        )
        return
    say(f"vllm    cannot be used for `device` {device}: {fault}")
    say(f"        tested versions: {', '.join(TESTED)}; {VARIABLE} names the Python of another environment")
    say("        to install it:")
    for line in install_text(device).splitlines():
        say(f"  {line}")
