"""`plait doctor engines`: which engines can draw samples on this machine."""

from __future__ import annotations

from typing import Literal

from plait.observe.screen import say


def doctor(what: Literal["engines"], /) -> int:
    """Look at what plait finds on this machine.

    Parameters
    ----------
    what
        engines: who can draw samples (`sampling.engine`), on this CPU and on GPUs where there are any: where each is,
        of which version, and how to install it.
    """
    import torch

    assert what == "engines", f"doctor has nothing to say of {what}"
    say("plait   is here: it needs nothing else")
    for device in ("cpu", *(("cuda",) if torch.cuda.is_available() else ())):
        _say_vllm(device)
    return 0


def _say_vllm(device: str) -> None:
    from plait.vllm.environment import TESTED, VARIABLE, install_text, look, vllm_python

    python, environment = vllm_python(device), look(device)
    fault = f"{python} is no Python that answers" if environment is None else environment.fault(device)
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
