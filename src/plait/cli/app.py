"""The list of commands; each is named by its import path and loaded when it is called."""

from __future__ import annotations

from cyclopts import App

from plait import __version__

app = App(
    name="plait",
    version=__version__,
    help="Train language models from feedback: write the algorithm, plan it, run it.",
)
