"""The list of commands; each is named by its import path and loaded when it is called."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter, Token

from plait import __version__
from plait.paths import at_home


def _whole(_: Any, tokens: Sequence[Token]) -> int:
    text = tokens[0].value
    if re.fullmatch(r"[+-]?[0-9]{1,19}", text) is None or abs(int(text)) >= 2**63:
        raise ValueError
    return int(text)


def _number(_: Any, tokens: Sequence[Token]) -> float:
    value = float(tokens[0].value)
    if not math.isfinite(value):
        raise ValueError
    return value


def _place(_: Any, tokens: Sequence[Token]) -> Path:
    return Path(at_home(tokens[0].value, None))


Number = Annotated[float, Parameter(converter=_number)]
"""A finite number as an option's type."""

Whole = Annotated[int, Parameter(converter=_whole)]
"""A whole number of 64 bits as an option's type; cyclopts alone would round 1.5."""

Place = Annotated[Path, Parameter(converter=_place)]
"""A file or folder as an option's type: in `--out=~/plan.json` no shell puts the home in."""

app = App(
    name="plait",
    version=__version__,
    help="Train language models from feedback: write the algorithm, plan it, run it.",
    help_epilogue="`plait COMMAND --help` lists what newcomers need, `plait COMMAND --help-all` everything.",
    default_parameter=Parameter(negative=()),
    suppress_keyboard_interrupt=False,  # `plait.cli` says that it came
)

TRAIN = "Train a model by a recipe."
EVAL = "Measure a model on a recipe's held-out items."

# Every command's help is printed by `plait.cli.help`.
app.command("plait.cli.train:train", name="train", help=TRAIN, help_flags=[], version_flags=[])
app.command("plait.cli.evaluate:evaluate", name="eval", help=EVAL, help_flags=[], version_flags=[])
app.command("plait.cli.export:export", name="export", help="Write a checkpoint of a run as a Hugging Face folder.")
app.command("plait.cli.generate:generate", name="generate", help="Sample responses to the prompts of a file.")
app.command("plait.cli.profile:profile", name="profile", help="Measure this machine for predictions.")
app.command("plait.cli.schedule:schedule", name="schedule", help="Schedule the pipelines of one or two models.")
app.command("plait.cli.plan:plan", name="plan", help="Find which devices a recipe's calls should run on.")
app.command("plait.cli.plan:simulate", name="simulate", help="Predict the steps of a recipe on a plan.")
app.command("plait.cli.trace:trace", name="trace", help="Look at a timeline: what ran when, on which rank.")
app.command("plait.cli.samples:samples", name="samples", help="Show what a model said in a step, and its rewards.")
app.command("plait.cli.doctor:doctor", name="doctor", help="Show what the doctor of a run found, or list engines.")
app.command(
    "plait.cli.completion:install_completion",
    name="--install-completion",
    help="Have your shell complete commands, options and recipe keys.",
)
