"""What this machine does where nothing was measured: by its CPU's instructions, cores and threads. By hand."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from plait.cost import machine
from plait.cost.hardware import GIB
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.machine import MACHINE_BANDWIDTH, cpu_kind, peak_of_gpus, threads_alone, unmeasured
from plait.cost.model_costs import ModelCosts
from plait.cost.workload import Workload
from plait.layout.mesh import Layout
from plait.recipes.algorithm import load_flow, trace_algorithm
from tests.cost.smollm2 import SHAPE

AVX2 = frozenset(("sse2", "avx", "avx2", "fma", "f16c"))
SERVER = AVX2 | {"avx512f", "avx512vl", "avx512bw", "avx512dq"}


@pytest.mark.parametrize(
    ("flags", "name", "bfloat16", "float32"),
    [
        (SERVER | {"avx512_bf16", "amx_bf16", "avx_vnni"}, "AVX-512 and matrix units", 350e9, 150e9),
        (SERVER | {"avx512_bf16", "avx_vnni"}, "AVX-512, bfloat16 and AVX-VNNI", 350e9, 150e9),
        (SERVER | {"avx512_bf16"}, "AVX-512 and bfloat16", 175e9, 90e9),
        (SERVER, "AVX-512", 150e9, 150e9),
        (AVX2 | {"avx512f"}, "AVX2", 50e9, 50e9),
        (AVX2, "AVX2", 50e9, 50e9),
        (AVX2 - {"fma"}, "neither AVX2 nor AVX-512", 10e9, 10e9),
        (frozenset(), "neither AVX2 nor AVX-512", 10e9, 10e9),
    ],
)
def test_a_cpu_is_of_the_first_kind_whose_instructions_it_has(
    flags: frozenset[str], name: str, bfloat16: float, float32: float
) -> None:
    kind = cpu_kind(flags)
    assert (kind.name, kind.bfloat16, kind.float32) == (name, bfloat16, float32)


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_flags", lambda: AVX2)
    monkeypatch.setattr(machine, "cpu_cores", lambda: 8)
    monkeypatch.setattr(machine, "limit", lambda: SimpleNamespace(bytes=32 * GIB))


@pytest.mark.usefixtures("eight_cores")
def test_a_process_does_what_the_cores_of_its_threads_do() -> None:
    """Two threads: 2 x 50 GFLOP/s and 2 x 16 GB/s, in either dtype, as bfloat16 is widened; half of that in float64."""
    cluster, calibration = unmeasured("cpu", 2, 2)
    device = cluster.device
    assert [device.flops_of(dtype) for dtype in ("bfloat16", "float32", "float64")] == [100e9, 100e9, 50e9]
    assert (device.memory_bandwidth, device.memory_bytes) == (32e9, 16 * GIB)
    assert (cluster.num_devices, calibration.profile, calibration.error) == (2, None, None)
    assert calibration.source == "what CPUs with AVX2 do, as this one was not measured (`plait profile` does)"


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(("devices", "threads", "cores"), [(1, 1, 1), (1, 16, 8), (2, 8, 4), (16, 1, 0.5)])
def test_threads_beyond_the_cores_do_no_more(devices: int, threads: int, cores: float) -> None:
    assert unmeasured("cpu", devices, threads)[0].device.flops == cores * 50e9


@pytest.mark.usefixtures("eight_cores")
def test_all_cores_together_read_no_more_than_a_machine_can() -> None:
    assert unmeasured("cpu", 1, 8)[0].device.memory_bandwidth == MACHINE_BANDWIDTH == 100e9
    assert unmeasured("cpu", 4, 2)[0].device.memory_bandwidth == 25e9


@pytest.mark.usefixtures("eight_cores")
def test_steps_of_the_measured_machine_are_predicted_within_a_quarter() -> None:
    """What one core of an EPYC with AVX2 took for half of the prompts of the demo (benchmarks/README.md): 6.7 s of its
    processor to score and 21.7 s to train 8 prompts of 99 tokens with 8 responses of 11 each."""
    flow = trace_algorithm(load_flow("grpo"), {"kl_coef": 0.01}, ("actor", "ref", "reward"))
    lengths = SampleLengths(Lengths.fixed(99), Lengths.fixed(11))
    workload = Workload(8, 8, lengths, micro_batch_tokens=4096)
    costs = ModelCosts(workload, dict.fromkeys(("actor", "ref"), SHAPE), flow, unmeasured("cpu", 1, 1)[0])
    alone = Layout.on(range(1))
    assert costs.call("ref.logprobs", "score", alone).seconds == pytest.approx(6.7, rel=0.25)
    assert costs.call("actor.train", "train", alone).seconds == pytest.approx(21.7, rel=0.25)


@pytest.mark.parametrize(
    ("said", "threads"), [("3", 3), ("3,2", 3), (" 3 ", 3), ("", 7), ("0", 7), ("many", 7), (None, 7)]
)
def test_threads_are_as_openmp_is_told(monkeypatch: pytest.MonkeyPatch, said: str | None, threads: int) -> None:
    """Clusters set lists, one number for each level of nesting, or leave the variable empty."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert (threads_alone(0), threads_alone(5)) == (threads, 5)


@pytest.mark.parametrize(
    ("names", "dtype", "peak"),
    [
        (["NVIDIA H100 80GB HBM3"] * 2, "bfloat16", 989e12),
        (["NVIDIA H100 80GB HBM3"] * 2, "float32", 67e12),
        (["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"], "bfloat16", None),
        (["NVIDIA H100 80GB HBM3", "NVIDIA T4"], "bfloat16", None),
        (["NVIDIA T4"], "bfloat16", None),
    ],
)
def test_the_peak_of_gpus_is_that_of_one_known_kind(
    names: list[str], dtype: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = [SimpleNamespace(name=name, total_memory=80 * GIB) for name in names]
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(names))
    monkeypatch.setattr("torch.cuda.get_device_properties", properties.__getitem__)
    assert peak_of_gpus(dtype) == peak
