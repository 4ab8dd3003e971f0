"""An action of a minute is no fault: with the deadlines that a recipe has by default, alone and where others wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.runs.placed_runs import OWN_FLOW, where
from tests.runs.plans import assert_equal_runs

ACTION_S = 60
SLEEP = """
    import ctypes
    from pathlib import Path

    told = Path(__file__).parent
    # In step 2, on the first rank that comes here: C code that lets go of the interpreter.
    if (told / "NAME/checkpoints/step-1").exists():
        try:
            (told / "NAME-begun").touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            (told / "NAME-left").write_text(str(ctypes.CDLL(None).sleep(SECONDS)))
"""
PLANS = {
    "alone": {"actor.generate": "0", "actor.train": "1", "critic.train": "0"},
    "together": {"actor.generate": "0,1 dp2", "actor.train": "0,1 tp2", "critic.train": "1,0 pp2"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_an_action_of_a_minute_survives(name: str, place: Path, placed: Callable[..., Recipe]) -> None:
    """The loss of a user's flow sleeps: on a rank that trains alone, and in a team whose other rank waits."""
    before, head, body = OWN_FLOW.partition("def pushed(batch, advantages, ref_logprobs):")
    sleep = SLEEP.replace("NAME", name).replace("SECONDS", str(ACTION_S))
    (place / f"flow_{name}.py").write_text(before + head + sleep + body)
    keys = {"steps": 3, "options": {}, "checkpoint.every": 1, "checkpoint.keep_last": 5}
    slow = placed(
        "own",
        name,
        **keys,
        **where(place, f"long-{name}", PLANS[name]),
        algorithm=f"PLACE/flow_{name}.py:baseline_flow",
    )
    for key in ("freeze_after_s", "stalled_after_s"):
        assert getattr(slow, key) == Recipe.model_fields[key].default
    run(slow)
    assert (place / f"{name}-left").read_text() == "0", "seconds of sleep that a signal cut off"
    one = placed("own", f"one-{name}", **keys)
    run(one)
    assert_equal_runs(slow.run_dir, one.run_dir)
