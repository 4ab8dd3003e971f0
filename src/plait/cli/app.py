"""The list of commands; each is named by its import path and loaded when it is called."""

from __future__ import annotations

from cyclopts import App

from plait import __version__

app = App(
    name="plait",
    version=__version__,
    help="Train language models from feedback: write the algorithm, plan it, run it.",
)

TRAIN = "Train a model: generate, score, learn, again and again."

# `train` prints its own help: the keys of a recipe.
app.command("plait.cli.train:train", name="train", help=TRAIN, help_flags=[], version_flags=[])
