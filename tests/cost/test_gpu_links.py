"""What GPUs of a machine that is not there send each other: measured, by their kind, or an estimate. By hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from plait.cost.cluster import ClusterSpec
from plait.cost.gpu_links import links_of, links_of_kind
from plait.cost.hardware import GIB, Link
from plait.cost.kept_profiles import load_profile, save_profile
from plait.cost.machine import unmeasured
from plait.cost.profile import LinkRecord, Profile, RunRecord
from plait.cost.traffic import Traffic
from plait.errors import DataError
from plait.layout.mesh import Layout
from tests.cost.test_profile import PROFILE

H100 = "NVIDIA H100 80GB HBM3"
GLOO = LinkRecord(bytes_per_s=2e9, latency_s=2e-4)
NOTHING = {"send": None, "all_reduce": None, "between": None}


def of_gpu(name: str = H100, **keys: object) -> Profile:
    """As `plait profile` makes one, without a measurement of links."""
    host = LinkRecord(bytes_per_s=4e10, latency_s=1e-5)
    made = {"machine": name, "device": "cuda", "memory_gib": 80.0, "host": host, "links_over": "nccl", **NOTHING}
    return PROFILE.model_copy(update={**made, **keys})


def cluster_of(profile: Profile) -> ClusterSpec:
    return profile.cluster(2, links_of(profile).effective)


@pytest.mark.parametrize(
    ("name", "gib", "bandwidth", "latency_s", "whose"),
    [
        (H100, 80, 450e9, 5e-6, "a share of vendors' numbers of H100"),
        ("NVIDIA H200", 141, 450e9, 5e-6, "a share of vendors' numbers of H200"),
        ("NVIDIA A100-SXM4-40GB", 40, 300e9, 5e-6, "a share of vendors' numbers of A100-40G"),
        ("NVIDIA A800-SXM4-80GB", 80, 200e9, 5e-6, "a share of vendors' numbers of A800"),
        ("NVIDIA L40S", 45, 25e9, 10e-6, "a share of vendors' numbers of L40S"),
        ("NVIDIA GeForce RTX 4090", 24, 20e9, 15e-6, "a share of vendors' numbers of RTX-4090"),
        ("NVIDIA H100 PCIe", 80, 50e9, 10e-6, "a share of vendors' numbers of H100 in a PCIe slot"),
        ("NVIDIA A100-PCIE-40GB", 40, 25e9, 10e-6, "a share of vendors' numbers of A100-40G in a PCIe slot"),
        ("NVIDIA GeForce RTX 3060", 12, 12e9, 15e-6, "an estimate, as plait does not know the NVIDIA GeForce RTX 3060"),
    ],
)
def test_gpus_have_the_links_of_their_kind(name: str, gib: int, bandwidth: float, latency_s: float, whose: str) -> None:
    """And programs get 0.8 of them."""
    found = links_of_kind(name, gib * GIB)
    assert (found.link, found.whose) == (Link(bandwidth, latency_s), whose)
    assert found.effective == Link(0.8 * bandwidth, latency_s)


def test_where_numbers_come_from_is_said() -> None:
    """Measured, known by the kind, or assumed."""
    nccl = LinkRecord(bytes_per_s=3.05e11, latency_s=1.6e-5)
    profiles = (of_gpu(send=nccl, all_reduce=nccl), of_gpu(), of_gpu("NVIDIA GeForce RTX 3060"))
    taken = "links between GPUs not measured, taken as"
    assert [links_of(profile).label for profile in profiles] == [
        "links between GPUs as they were measured over NCCL, 305 GB/s and 16 us",
        f"{taken} 360 GB/s and 5 us, a share of vendors' numbers of H100",
        f"{taken} 9.6 GB/s and 15 us, an estimate, as plait does not know the NVIDIA GeForce RTX 3060",
    ]


def test_a_profile_has_the_links_of_its_kind_until_they_are_measured() -> None:
    """A sum of 36 MB over two: 100 us at 360 GB/s, behind a latency of 5. Measured, 200 us behind 20."""
    measured = LinkRecord(bytes_per_s=1.8e11, latency_s=2e-5)
    seconds = [
        Traffic(cluster_of(profile), Layout.on(range(2), tp=2)).all_reduce("tp", 36e6)
        for profile in (of_gpu(), of_gpu(send=measured, all_reduce=measured))
    ]
    assert seconds == pytest.approx([105e-6, 220e-6])
    assert cluster_of(of_gpu()).host == Link(4e10, 1e-5)


def two_gpus(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    properties = SimpleNamespace(name=name, total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


@pytest.mark.parametrize("profile", [of_gpu(), None])
def test_a_profile_and_none_agree(profile: Profile | None, monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus(monkeypatch, H100)
    cluster = unmeasured("cuda", 2, 1)[0] if profile is None else cluster_of(profile)
    assert Traffic(cluster, Layout.on(range(2), tp=2)).all_reduce("tp", 36e6) == pytest.approx(105e-6)


@pytest.mark.parametrize(("devices", "says"), [(1, False), (2, True)])
def test_without_a_profile_links_are_said_where_there_are_any(
    devices: int, says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus(monkeypatch, H100)
    source = unmeasured("cuda", devices, 1)[1].source
    assert ("; links between GPUs not measured, taken as 360 GB/s" in source) == says


def a_run(devices: int) -> RunRecord:
    return RunRecord(devices=devices, predicted_s=2.0, measured_s=1.0)


def old_file(path: Path, leaving_out: Sequence[str] = ()) -> Path:
    """Of a GPU, as it was written when two processes sent each other over gloo."""
    old = of_gpu(send=GLOO, all_reduce=GLOO, between=GLOO, runs=(a_run(1), a_run(2)))
    save_profile(old, path)
    record = json.loads(path.read_text())
    path.write_text(json.dumps({key: record[key] for key in record if key not in ("links_over", *leaving_out)}))
    return path


def test_what_a_kept_profile_of_gpus_says_of_gloo_is_left_away(tmp_path: Path) -> None:
    """And runs on several, which it predicted. All else stays."""
    found = load_profile(old_file(tmp_path / "old.json"))
    assert found == of_gpu(runs=(a_run(1),))
    assert cluster_of(found).intra == Link(360e9, 5e-6)
    save_profile(found, tmp_path / "new.json")
    assert load_profile(tmp_path / "new.json") == found


def test_copies_to_the_host_that_an_older_one_had_from_gloo_stay(tmp_path: Path) -> None:
    found = load_profile(old_file(tmp_path / "old.json", leaving_out=["host"]))
    assert cluster_of(found).host == GLOO.link


def test_what_was_measured_over_nccl_stays(tmp_path: Path) -> None:
    nccl = LinkRecord(bytes_per_s=3e11, latency_s=2e-5)
    measured = of_gpu(send=nccl, all_reduce=nccl, runs=(a_run(2),))
    save_profile(measured, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == measured


@pytest.mark.parametrize(("profile", "missing"), [(PROFILE, "all_reduce"), (PROFILE, "send"), (of_gpu(), "host")])
def test_links_that_are_always_measured_may_not_be_missing(profile: Profile, missing: str, tmp_path: Path) -> None:
    save_profile(profile, tmp_path / "p.json")
    record = json.loads((tmp_path / "p.json").read_text())
    (tmp_path / "p.json").write_text(json.dumps({key: record[key] for key in record if key != missing}))
    with pytest.raises(DataError, match=f"p.json: .*`{missing}`"):
        load_profile(tmp_path / "p.json")
