"""What two processes measure of each other: over gloo, and as NCCL would run it on GPUs that are not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.cost.measured import links
from plait.cost.measured.links import REPEATS, SIZES, TURNS, Links, Pair, measure_gpu_links
from plait.launch.local import LocalProcesses
from plait.models.compute import widened
from tests.nccl_rules import Log, played, recording


@pytest.mark.parametrize("widens", [True, False])
def test_processes_that_share_a_machine_compute_as_runs_do(monkeypatch: pytest.MonkeyPatch, widens: bool) -> None:
    """By widened numbers where there are no instructions for bfloat16: torch's products take ten times as long there,
    and wait for memory a tenth as much. Three products of a turn."""
    products: list[torch.Tensor] = []
    monkeypatch.setattr(widened, "WIDENS", widens)
    monkeypatch.setattr(widened, "product", lambda x, weight, bias: products.append(weight) or x)
    pair = Pair.__new__(Pair)
    rows, weights = torch.ones(2, 4).bfloat16(), [torch.ones(4, 4).bfloat16() for _ in range(3)]
    with torch.inference_mode():
        assert pair.computing(rows, weights) > 0
    assert len(products) == (3 * TURNS if widens else 0)


class RecordedPair(Pair):
    """As on GPUs, though gloo carries what it posts."""

    def __init__(self, context: Any) -> None:
        self._entered = recording()
        self._log = self._entered.__enter__()
        super().__init__(context, "cpu")

    def log(self) -> Log:
        return self._log

    def close(self) -> None:
        self._entered.__exit__(None, None, None)


@pytest.mark.process
def test_what_is_measured_keeps_nccls_rules() -> None:
    """Connections first; then two messages, or a sum, of each size, as often as it is repeated."""
    with LocalProcesses().start(RecordedPair, 2) as group:
        for measured in group.submit([0, 1], "messages").result(60.0)[0]:
            assert [size for size, _ in measured] == list(SIZES["cpu"])
            assert all(seconds > 0 for _, seconds in measured)
        logs = group.submit([0, 1], "log").result(60.0)
    assert played(dict(enumerate(logs))) == 2 * (3 + 3 * REPEATS * len(SIZES["cpu"]))


def on_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> list[Any]:
    """Of so many. Messages take 20 us and 1 ms for 200 MB, sums 30 us and 2 ms; what workers were started with."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    started: list[Any] = []
    measured = ([(1_000, 2e-5), (200_000_000, 1.02e-3)], [(1_000, 3e-5), (200_000_000, 2.03e-3)])

    class Two:
        def start(self, worker: type, num_ranks: int, *, arguments: tuple[str, ...], deadline_s: float) -> Two:
            started.append((worker, num_ranks, arguments, deadline_s))
            return self

        def __enter__(self) -> Two:
            return self

        def __exit__(self, *error: object) -> None: ...

        def submit(self, ranks: list[int], method: str) -> Any:
            return SimpleNamespace(result=lambda deadline_s: [measured, measured])

    monkeypatch.setattr(links, "LocalProcesses", Two)
    return started


def test_two_gpus_are_measured_by_a_process_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 MB in a millisecond beyond the latency are 200 GB/s, in two 100."""
    started = on_gpus(monkeypatch, 8)
    found = measure_gpu_links()
    assert started == [(Pair, 2, ("cuda",), links.START_S)]
    assert found.send is not None
    assert found.all_reduce is not None
    assert (found.send.bytes_per_s, found.send.latency_s) == pytest.approx((2e11, 2e-5))
    assert (found.all_reduce.bytes_per_s, found.all_reduce.latency_s) == pytest.approx((1e11, 3e-5))
    assert (found.between, found.contention) == (None, 1.0)


def test_one_gpu_has_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    started = on_gpus(monkeypatch, 1)
    assert measure_gpu_links() == Links()
    assert not started


@pytest.mark.process
def test_where_links_cannot_be_measured_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Processes that find no GPU end with the reason, and nothing is known of links."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert measure_gpu_links() == Links()
    err = capsys.readouterr().err
    assert err.startswith("links between GPUs are not measured: rank ")
    assert err.count("\n") == 1


def test_a_gpu_is_waited_for_behind_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen of 1 ms each, and a wait of 1.6: 1.1 ms a message, as a wait of its own would cost each 1.6."""
    asked, clock = [0], [0.0]

    def synchronize() -> None:
        clock[0] += 1e-3 * asked[0] + 1.6e-3 * (asked[0] > 0)
        asked[0] = 0

    def work(tensor: torch.Tensor) -> None:
        asked[0] += 1

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda count, device: zeros(count))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(links.time, "perf_counter", lambda: clock[0])
    pair = Pair.__new__(Pair)
    pair.device = "cuda"
    assert pair.timed(work, 64) == pytest.approx(1.1e-3)
