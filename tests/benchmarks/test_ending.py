"""Of a benchmark that is terminated no run is left."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.process
RECIPE = {"model": "a model", "prompts_per_step": 4, "samples_per_prompt": 4, "steps": 3, "sampling": {}}
STAND_INS: dict[str, Callable[..., Any]] = {
    "grpo": lambda *_, **__: dict(RECIPE),
    "recipe_of_setting": lambda *_, **__: dict(RECIPE),
    "write_reward_model": lambda *_: "a model",
    "have_profile": lambda *_, **__: None,
    "shares_of": lambda *_: SimpleNamespace(layers=2, head=(1.0, 1.0)),
    "link_bytes_per_s": lambda: 1.0,
}
"""For what benchmarks make and measure before their first run."""


class Run(subprocess.Popen):  # type: ignore[type-arg]
    """One without end: whoever looks after it is terminated meanwhile, once."""

    is_looked_after = False

    def poll(self) -> int | None:
        self._terminate_the_benchmark()
        return super().poll()

    def wait(self, timeout: float | None = None) -> int:
        self._terminate_the_benchmark()
        return super().wait(timeout)

    def _terminate_the_benchmark(self) -> None:
        if not self.is_looked_after:
            self.is_looked_after = True
            signal.raise_signal(signal.SIGTERM)


def unasked(*_: object) -> None:
    raise AssertionError("SIGTERM came, and the benchmark did not ask for it")


@pytest.fixture
def handler() -> Iterator[Any]:
    """Of SIGTERM, before the benchmark and behind it."""
    before = signal.signal(signal.SIGTERM, unasked)
    yield unasked
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("devices", []),
        ("launchers", ["--kinds", "local"]),
        ("overlap", []),
        ("plans_measured", ["--parts", "settings"]),
        ("sample_reallocation", ["--parts", "real"]),
        ("stage_fusion", []),
        ("workers", ["--parts", "one"]),
    ],
    ids=str,
)
def test_its_runs_end_before_it(
    name: str,
    options: list[str],
    handler: Any,
    imported: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And SIGTERM is handled as before."""
    benchmark, begun = imported(name), []

    def begin(*_: object) -> Run:
        begun.append(Run(["sleep", "600"]))
        return begun[-1]

    for module in (benchmark, imported("placed.runs")):
        monkeypatch.setattr(module, "begin", begin, raising=False)
    for what, stand_in in STAND_INS.items():
        monkeypatch.setattr(benchmark, what, stand_in, raising=False)
    for variable in ("PLAIT_CACHE", "PLAIT_BENCHMARK_TURNS"):
        monkeypatch.setenv(variable, str(tmp_path))  # and is given back what it was
    with pytest.raises(SystemExit, match="143"):
        benchmark.main(["--tiny", *options])
    assert [run.returncode for run in begun] == [-signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is handler
