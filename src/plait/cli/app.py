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

EVAL = "Answer a recipe's held-out items: plait eval RECIPE [--model FOLDER] [--json] [--key value …]"

# `train` prints its own help: the keys of a recipe.
app.command("plait.cli.train:train", name="train", help=TRAIN, help_flags=[], version_flags=[])
app.command("plait.cli.evaluate:evaluate", name="eval", help=EVAL)
app.command("plait.cli.export:export", name="export", help="Write a checkpoint of a run as a Hugging Face folder.")
app.command("plait.cli.generate:generate", name="generate", help="Sample responses to the prompts of a JSONL file.")
app.command("plait.cli.schedule:schedule", name="schedule", help="Schedule the pipelines of two models fused into one.")
app.command("plait.cli.trace:trace", name="trace", help="Look at a timeline: what ran when, on which rank.")
