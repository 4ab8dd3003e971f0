"""Which profile answers for a run, how far off it is said to be, and how runs correct it. By hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plait.cost.calibration import (
    OTHER_DTYPE,
    OTHER_LAYERS,
    OTHER_THREADS,
    VENDORS,
    Calibration,
    calibrated,
    of_cluster,
    speaks_for,
    uncorrected,
)
from plait.cost.cluster import Checked
from plait.cost.cluster_file import read_cluster
from plait.cost.estimate import model_shape
from plait.cost.hardware import DEVICES, GIB
from plait.cost.kept_profiles import keep_profile, kept_profiles, load_profile, profiles_of_gpu
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.model_costs import ModelCosts
from plait.cost.profile import KEPT_RUNS, KindRecord, RunRecord
from plait.cost.workload import Workload
from plait.layout.mesh import Layout
from tests.cost.test_model_costs import SHAPE, a_flow
from tests.cost.test_profile import PROFILE


def a_run(measured: float, decode: float, *, devices: int = 1, predicted: float = 10.0) -> RunRecord:
    """Decoding: 2 s by the profile, 4 s predicted."""
    kinds = {"decode on 1": KindRecord(profile_s=2.0, predicted_s=4.0, measured_s=decode)}
    return RunRecord(devices=devices, predicted_s=predicted, measured_s=measured, kinds=kinds)


def test_a_profile_of_this_shape_dtype_and_threads_is_taken_as_it_is() -> None:
    """More layers are the same layers."""
    found = calibrated([PROFILE], replace(SHAPE, layers=40), "bfloat16", 1)
    assert found.exact
    assert found.profile is PROFILE
    assert (found.error, found.runs) == (PROFILE.error, 0)


def test_the_nearest_is_scaled_and_its_doubt_is_said() -> None:
    """Float32 has twice the bytes of bfloat16, four threads share what one did."""
    far = PROFILE.model_copy(
        update={"dtype": "float32", "threads": 8, "decode_by_layers": ((1, 10, 3.0),), "head_backward": ((10, 4.0),)}
    )
    found = calibrated([far, PROFILE], SHAPE, "float32", 4)
    assert found.profile is not None
    assert not found.exact
    assert found.profile.threads == 4
    assert found.profile.forward == ((10, 2.0), (20, 4.0)), "those of 8 threads are nearer: half as many"
    assert found.profile.decode_by_layers == ((1, 10, 6.0),)
    assert found.profile.head_backward[0][1] / found.profile.head[0][1] == 4.0 / PROFILE.head[0][1]
    assert found.error == pytest.approx(PROFILE.error + OTHER_THREADS)
    alone = calibrated([PROFILE], SHAPE, "float32", 4)
    assert alone.profile is not None
    assert alone.profile.forward == ((10, 0.5), (20, 1.0))
    assert alone.profile.decode[0] == (1, 10, 0.5)
    assert alone.error == pytest.approx(PROFILE.error + OTHER_DTYPE + 2 * OTHER_THREADS)
    assert "scaled to this run" in alone.source


def test_where_products_are_widened_only_what_reads_weights_goes_by_their_bytes() -> None:
    """Rows of bfloat16 are computed in float32 there, and take as long; in float64 they take twice as long."""
    widening = PROFILE.model_copy(update={"widens": True, "drawing": ((1, 0.1),)})
    one, two = (calibrated([widening], SHAPE, dtype, 1).profile for dtype in ("float32", "float64"))
    assert one is not None
    assert two is not None
    assert (one.forward, one.products, one.head) == (PROFILE.forward, PROFILE.products, PROFILE.head)
    assert one.decode[0] == (1, 10, 2 * PROFILE.decode[0][2])
    assert two.forward == ((10, 2.0), (20, 4.0))
    assert two.decode[0] == (1, 10, 4 * PROFILE.decode[0][2])
    assert (one.drawing, two.drawing) == (((1, 0.2),), ((1, 0.4),))


def test_twice_the_weights_of_a_layer_are_another_shape() -> None:
    wide = replace(SHAPE, attention_parameters=2 * SHAPE.attention_parameters, intermediate=2 * SHAPE.intermediate)
    found = calibrated([PROFILE], wide, "bfloat16", 1)
    assert not found.exact
    assert found.error == pytest.approx(PROFILE.error + OTHER_LAYERS)


def test_a_tiny_layer_says_nothing_of_large_ones() -> None:
    """A profile of a toy stood for a model of 135 million parameters: a step was predicted as 2,510 s, and took 11."""
    smollm, large = (model_shape(name) for name in ("smollm2-135m", "llama-2-7b"))
    assert speaks_for(PROFILE, replace(SHAPE, intermediate=2 * SHAPE.intermediate))
    assert not speaks_for(PROFILE, smollm)
    measured = PROFILE.model_copy(update={"shape": smollm})
    assert speaks_for(measured, large), "3.5 million weights a layer keep a core busy"
    assert speaks_for(measured, SHAPE)


def test_past_runs_say_how_wrong_predictions_were() -> None:
    """10 s predicted: 8 s were a quarter less, 12.5 s a fifth more. Decoding 4 s: 5 and 2 s."""
    profile = PROFILE.with_run(a_run(8.0, 5.0)).with_run(a_run(12.5, 2.0))
    found = calibrated([profile], SHAPE, "bfloat16", 1)
    assert found.runs == 2
    assert found.error == pytest.approx((0.25 + 0.2) / 2)
    assert found.kinds == pytest.approx({"decode on 1": (0.2 + 1.0) / 2})
    assert "corrected by 2 runs" in found.source


def test_ratios_are_those_of_runs_on_as_many_devices() -> None:
    """On one device 2 s became 5, 2 and 3 s: 2.5, 1 and 1.5 times as much. On two 8 s."""
    profile = PROFILE
    for decode in (5.0, 2.0, 3.0):
        profile = profile.with_run(a_run(9.0, decode))
    profile = profile.with_run(a_run(9.0, 8.0, devices=2))
    alone = profile.ratios(1)["decode on 1"]
    assert (alone.value, alone.runs) == (1.5, 3)
    assert profile.ratios(2)["decode on 1"].value == 4.0
    assert profile.ratios(7)["decode on 1"].runs == 4, "of no run on seven, all"


def test_predictions_take_as_long_as_runs_did() -> None:
    flow, lengths = a_flow(), SampleLengths(Lengths.fixed(10), Lengths.fixed(2))
    workload = Workload(1, 1, lengths, micro_batch_tokens=100)
    profile = PROFILE.with_run(a_run(9.0, 6.0))
    corrected, plain = (
        ModelCosts(workload, dict.fromkeys(flow.roles, SHAPE), flow, profile.cluster(1), profile=known)
        for known in (profile, uncorrected(profile))
    )
    place = Layout.on(range(1))
    more, less = (one.call("actor.generate", "decode", place) for one in (corrected, plain))
    assert more.seconds == pytest.approx(3.0 * less.seconds)
    assert sum(more.terms.values()) == pytest.approx(more.seconds)
    assert more.instance_seconds == pytest.approx([3.0 * less.seconds])
    assert more.working_bytes == less.working_bytes
    assert corrected.call("ref.logprobs", "score", place) == plain.call("ref.logprobs", "score", place)


def test_the_newest_runs_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    profile = PROFILE
    for number in range(KEPT_RUNS + 2):
        profile = profile.with_run(a_run(1.0 + number, 5.0))
    path = keep_profile(profile)
    assert load_profile(path) == profile
    assert [one.measured_s for one in profile.runs] == [1.0 + number for number in range(2, KEPT_RUNS + 2)]
    (tmp_path / "profiles/torn.json").write_text("{")
    assert kept_profiles(PROFILE.machine, "cpu") == [profile], "what cannot be read is none"
    assert kept_profiles("another machine", "cpu") == []


def test_a_cluster_says_how_wrong_predictions_for_it_were() -> None:
    """As its file states it, whatever runs there were; else the errors of runs on such devices: 0.25 and 0.2."""
    cluster = read_cluster("8xH100")
    ran = PROFILE.with_run(a_run(8.0, 5.0, devices=8)).with_run(a_run(12.5, 2.0, devices=8)).with_run(a_run(1.0, 2.0))
    stated = replace(cluster, checked=Checked("ten runs", 0.044))
    assert of_cluster(stated, [ran]) == Calibration("ten runs", 0.044)
    assert of_cluster(cluster, []) is VENDORS
    assert of_cluster(cluster, [PROFILE]) is VENDORS, "no run, no error"
    found = of_cluster(cluster, [PROFILE, ran])
    assert (found.error, found.runs, found.profile) == (pytest.approx(0.225), 2, None)
    assert found.kinds == pytest.approx({"decode on 1": (0.2 + 1.0) / 2})
    assert "2 runs on a machine, 2 cores, predicted by what was measured there" in found.source


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("A100-80G", "NVIDIA A100-SXM4-80GB"),
        ("A100-40G", "NVIDIA A100-SXM4-40GB"),
        ("RTX-4090", "NVIDIA GeForce RTX 4090"),
        ("H200", "NVIDIA H200"),
    ],
)
def test_profiles_of_a_gpu_are_found_by_its_name(
    name: str, machine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    gib = DEVICES[name].memory_bytes / GIB
    profile = PROFILE.model_copy(update={"machine": machine, "device": "cuda", "memory_gib": gib, "links_over": "nccl"})
    keep_profile(profile)
    keep_profile(PROFILE)
    assert profiles_of_gpu(name) == [profile]
    others = {"H100", "A100-80G", "A100-40G", "RTX-4090", "H200", "H20", "mine"} - {name}
    assert not [other for other in others if profiles_of_gpu(other)]
