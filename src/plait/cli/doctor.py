"""`plait doctor engines`: which engines can draw samples on this machine."""

from __future__ import annotations

from typing import Literal

from plait.observe.screen import say


def doctor(what: Literal["engines"], /) -> int:
    """Look at what plait finds on this machine.

    Parameters
    ----------
    what
        engines: who can draw samples (`sampling.engine`), on GPUs where there are any: where each is, of which version,
        and how to install it.
    """
    import torch

    from plait.vllm.environment import TESTED, VARIABLE, install_text, look, vllm_python

    assert what == "engines", f"doctor has nothing to say of {what}"
    say("plait   is here: it needs nothing else")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    python, environment = vllm_python(device), look(device)
    fault = f"{python} is no Python that answers" if environment is None else environment.fault(device)
    if environment is not None and not fault:
        say(
            f"vllm    is here: vLLM {environment.vllm}, torch {environment.torch}, transformers "
            f"{environment.transformers}, in {python}; tokens are a function of the seed"
        )
        return 0
    say(f"vllm    cannot be used: {fault}")
    say(f"        tested versions: {', '.join(TESTED)}; {VARIABLE} names the Python of another environment")
    say(f"        to install it, for `device` {device}:")
    for line in install_text(device).splitlines():
        say(f"  {line}")
    return 0
