"""Cluster files and names: what is read, and what is refused with the key named."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.cost.cluster import Checked
from plait.cost.cluster_file import names, read_cluster
from plait.cost.hardware import DEVICES, GIB, Link
from plait.errors import ConfigError
from plait.layout.mesh import Cluster

TWO_NODES = """
nodes: 2
devices_per_node: 4
device: {name: mine, tflops: 100, memory_gib: 16, memory_gb_per_s: 500}
intra: { gb_per_s: 50, latency_us: 4}
inter: {gb_per_s: 12.5, latency_us: 20}
host: {gb_per_s: 20, latency_us: 10}
price_per_device_hour: 1.5
software: {products: 0.4, layer_us: 100}
"""


def write(folder: Path, text: str) -> str:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return str(path)


def test_a_name_is_so_many_devices_of_a_node() -> None:
    found = read_cluster("16xA100-80G")
    assert (found.nodes, found.devices_per_node, found.name) == (2, 8, "16xA100-80G")
    assert found.device is DEVICES["A100-80G"]
    assert found.device.memory_bytes == 80 * GIB
    assert found.intra.bandwidth == 300e9
    assert found.mesh_cluster == Cluster(2, 8)
    assert read_cluster("2xH100").mesh_cluster == Cluster(1, 2)


def test_every_listed_device_has_a_cluster() -> None:
    assert names() == tuple(sorted(DEVICES))
    for name in names():
        assert read_cluster(f"8x{name}").num_devices == 8


def test_a_file_states_everything(tmp_path: Path) -> None:
    found = read_cluster(write(tmp_path, TWO_NODES))
    assert (found.num_devices, found.device.flops, found.price_per_device_hour) == (8, 100e12, 1.5)
    assert found.inter == Link(12.5e9, 20e-6)
    assert (found.software.products, found.software.layer_s, found.software.memory) == (0.4, 100e-6, 0.8)
    assert read_cluster(write(tmp_path, TWO_NODES), 16).nodes == 4
    assert read_cluster(write(tmp_path, TWO_NODES), 2).mesh_cluster == Cluster(1, 2)


def test_what_moves_take_beside_their_bytes_and_how_wrong_predictions_were_may_be_stated(tmp_path: Path) -> None:
    plain = read_cluster(write(tmp_path, TWO_NODES))
    assert (plain.software.switch_s, plain.software.pack_bandwidth, plain.checked) == (0.0, 0.0, None)
    text = TWO_NODES.replace("layer_us: 100", "layer_us: 100, switch_us: 2.5e6, pack_gb_per_s: 40")
    found = read_cluster(write(tmp_path, text + "calibration: {source: ten runs, error: 0.044}\n"))
    assert (found.software.switch_s, found.software.pack_bandwidth) == (2.5, 40e9)
    assert found.checked == Checked("ten runs", 0.044)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("price", "calibration: {source: mine}\nprice"), r"key `calibration\.error` is missing"),
        (("price", "calibration: {source: '', error: 0.1}\nprice"), r"key `calibration\.source`: .*found ''"),
        (("price", "calibration: {source: mine, error: -1}\nprice"), r"key `calibration\.error`: .*found -1"),
        (("price", "calibration: {source: mine, eror: 1}\nprice"), r"`calibration\.eror`; did you mean `error`"),
        (("price", "calibration: 0.1\nprice"), r"`calibration` is a section of keys, found 0\.1"),
        (("layer_us: 100", "switch_us: -1"), r"key `software\.switch_us`: .*found -1"),
        (("tflops: 100", "tflops: .nan"), r"key `device\.tflops`: .*found nan"),
        (("tflops: 100", "tflops: true"), r"key `device\.tflops`: expected a number, found true"),
        (("tflops: 100, ", ""), r"key `device\.tflops` is missing"),
        (
            (TWO_NODES, "nodes: 2\ndevice: H100\nintra: {gb_per_s: 50}\n"),
            r"keys `devices_per_node`, `intra\.latency_us`, `inter`, `host` are missing \(docs/predictions\.md\)",
        ),
        ((" gb_per_s: 50,", " gb_per_s: 0,"), r"key `intra\.gb_per_s`: .*greater than 0, found 0"),
        ((", latency_us: 4}", ", lag_us: 4}"), r"unknown key `intra\.lag_us`; did you mean `latency_us`"),
        (("inter:", "between:"), r"unknown key `between`; it has .*`nodes`, .*`inter`"),
        (("nodes: 2", "nodes: [{device: H100}, {device: L40S}]"), r"key `devices_per_node`: where `nodes` is a list"),
        (("nodes: 2", "nodes: 2.5"), r"key `nodes`: .*found 2\.5"),
        (("nodes: 2", "nodes: 4000"), r"at most 4096 devices"),
        (("{products: 0.4, layer_us: 100}", "fast"), r"`software` is a section of keys, found 'fast'"),
        (("{products: 0.4,", "{products: 1.4,"), r"key `software\.products`: .*less than or equal to 1, found 1\.4"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_cluster(write(tmp_path, TWO_NODES.replace(*change)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("8xA100", "did you mean `A100-40G`"),
        ("H100", "expected COUNTxDEVICE"),
        ("12xH100", "expected at most 8, the devices of a node, or a multiple of it, found 12"),
        ("missing.yaml", "missing.yaml"),
    ],
)
def test_names_that_stand_for_nothing(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_cluster(name)


def test_a_device_of_another_name(tmp_path: Path) -> None:
    text = TWO_NODES.replace("{name: mine, tflops: 100, memory_gib: 16, memory_gb_per_s: 500}", "H10")
    with pytest.raises(ConfigError, match=r"key `device`: expected one of .*found `H10`; did you mean `H"):
        read_cluster(write(tmp_path, text))
