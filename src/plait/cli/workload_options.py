"""The options of `plait schedule` that describe the pipelines: `--forward 5,4` or `--forward 5:5:6:7,4:4`.

A comma separates the two models, a colon the stages of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from cyclopts import Parameter

from plait.errors import ConfigError
from plait.json_text import whole_number

if TYPE_CHECKING:
    from plait.schedule.pipeline import Workload

MOST_TIME = 1e12
"""The longest forward, the largest memory: sums of many stay exact to the microsecond."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Each field is an option."""

    stages: str
    """Pipeline stages of each model, `8,4`; one must divide the other. The shorter runs as 8/4 = 2 copies."""
    microbatches: str
    """Micro-batches of each copy, `32,16`."""
    forward: str = "1"
    """Time of a forward, in any unit."""
    backward: str | None = None
    """Time of a backward; twice the forward when left out."""
    memory: str = "1"
    """Activation memory of a micro-batch on a stage, in any unit."""
    cap: str | None = None
    """Most activation memory that a rank may hold; one value, or one per rank with colons."""
    models: str = "actor,critic"
    """Names of the models."""

    def workload(self) -> Workload:
        """The workload that the options describe.

        Raises:
            ConfigError: naming the option.
        """
        from plait.schedule.pipeline import fused_workload

        counts = _whole("stages", self.stages)
        per_model = lambda option, text: _numbers(option, text, len(counts))
        caps: float | list[float] = inf
        if self.cap is not None:
            values = [_number("cap", word) for word in self.cap.split(":")]
            caps = values[0] if len(values) == 1 else values
        names = [name.strip() for name in self.models.split(",")]
        if not all(name.isidentifier() for name in names) or len(set(names)) != len(names):
            raise ConfigError(f"--models: expected different plain names such as actor,critic, found {self.models!r}")
        try:
            return fused_workload(
                counts,
                _whole("microbatches", self.microbatches),
                per_model("forward", self.forward),
                None if self.backward is None else per_model("backward", self.backward),
                per_model("memory", self.memory),
                caps,
                names,
            )
        except ConfigError as error:
            raise ConfigError(f"--{error}" if str(error).startswith(_OPTIONS) else str(error)) from error


_OPTIONS = ("stages", "microbatches", "forward", "backward", "memory", "cap")


def _whole(option: str, text: str) -> list[int]:
    try:
        return [whole_number(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"--{option}: expected whole numbers such as 8,4, found {text!r:.80}") from None


def _number(option: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise ConfigError(f"--{option}: expected a number, found {word!r:.80}") from None
    if not 0 <= value <= MOST_TIME:
        raise ConfigError(f"--{option}: expected a number from 0 to {MOST_TIME:g}, found {word!r:.80}")
    return value


def _numbers(option: str, text: str, num_models: int) -> list[float | list[float]]:
    """One value or list of stages per model; a single value serves all models."""
    parts = text.split(",")
    if len(parts) == 1 and ":" not in text:
        parts *= num_models
    values = [[_number(option, word) for word in part.split(":")] for part in parts]
    return [value[0] if len(value) == 1 else value for value in values]
