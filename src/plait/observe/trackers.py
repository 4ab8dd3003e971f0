"""Metrics to TensorBoard and Weights & Biases through `accelerate.tracking`; off unless the recipe names them.

The packages are imported when a tracker is opened, never before. After a resume TensorBoard hides the points
behind the checkpoint (they are written again); Weights & Biases goes on with the same run and ignores steps that
it has already, which carry the same values.
"""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.errors import ConfigError

# Any one of the packages will do; the first is the one to install.
_PACKAGES: Mapping[str, tuple[str, ...]] = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",)}


def check_trackers(names: Sequence[str]) -> None:
    """Check that each named tracker is known and its package installed; imports nothing.

    Raises:
        ConfigError: it is not; names the key `trackers` and the remedy.
    """
    for name in names:
        packages = _PACKAGES.get(name)
        if packages is None:
            raise ConfigError(f"key `trackers`: expected some of {', '.join(_PACKAGES)}, found `{name}`")
        if not any(importlib.util.find_spec(package) for package in packages):
            raise ConfigError(
                f"key `trackers`: `{name}` needs the package {packages[0]}, which is not installed; "
                f"run `pip install {packages[0]}`, or take `{name}` out of `trackers`"
            )


class Trackers:
    """The trackers of one run. With no names it does nothing and costs nothing.

    names: from `tensorboard`, `wandb`; folder: the run directory, where TensorBoard writes `tensorboard/` and W&B
    `wandb/`; config: the resolved recipe, stored once at the start of a run; last_step: the step after which a
    resumed run goes on, -1 for a new run (whose first step may be 0: what was measured before training).

    Raises:
        ConfigError: as `check_trackers`, or the tracker refuses to start (W&B without a login).
    """

    def __init__(self, names: Sequence[str], folder: str | Path, config: Mapping[str, Any], *, last_step: int = -1):
        check_trackers(names)
        self._last_step = last_step
        self._trackers = [self._open(name, Path(folder)) for name in dict.fromkeys(names)]
        if last_step < 0:
            for tracker in self._trackers:
                tracker.store_init_configuration(_flat(config))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send the numbers among `metrics` as the values of training step `step`, which must be a new one."""
        assert step > self._last_step, f"step {step} logged after step {self._last_step}"
        self._last_step = step
        if not self._trackers:
            return
        numbers = {name: float(value) for name, value in metrics.items() if _is_number(value)}
        for tracker in self._trackers:
            tracker.log(numbers, step=step)

    def close(self) -> None:
        """Send what is pending and end the trackers' sessions."""
        trackers, self._trackers = self._trackers, []
        for tracker in trackers:
            tracker.finish()

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, name: str, folder: Path) -> Any:
        import accelerate.tracking as tracking
        from accelerate import PartialState

        PartialState(cpu=True)  # accelerate's trackers log through it; it touches no device
        if name == "tensorboard":
            tracker: Any = tracking.TensorBoardTracker("tensorboard", str(folder), purge_step=self._last_step + 1)
            tracker.start()
            return tracker
        import wandb  # pyright: ignore[reportMissingImports]

        project = os.environ.get("WANDB_PROJECT", "plait")
        tracker = tracking.WandBTracker(
            project, name=folder.resolve().name, id=_wandb_id(folder), dir=str(folder), resume="allow"
        )
        try:
            tracker.start()
        except wandb.Error as error:
            raise ConfigError(
                f"key `trackers`: Weights & Biases does not start: {error}; log in with `wandb login`, "
                "set WANDB_MODE=offline, or take `wandb` out of `trackers`"
            ) from error
        return tracker


def _wandb_id(folder: Path) -> str:
    """The run's id at W&B: drawn once per run directory, found again by a resumed run."""
    path = folder / "wandb" / "run_id"
    if path.exists() and (run_id := path.read_text().strip()):
        return run_id
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(run_id := uuid.uuid4().hex[:12])
    return run_id


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (hasattr(value, "item") and isinstance(value.item(), (int, float)))


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    flat: dict[str, bool | int | float | str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if type(value) in (bool, int, float, str) else str(value)
    return flat
