"""Clusters: how many devices of what kind, and what connects them. Read from small YAML files, as strictly as recipes.

A name such as `16xH100` stands for so many devices of a file that ships with plait (`cost/clusters/H100.yaml`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from plait.cost.hardware import DEFAULT, DEVICES, GIB, GIGA, TERA, Device, Link, Software
from plait.errors import ConfigError
from plait.layout.mesh import Cluster
from plait.recipes.keys import nearest, shown
from plait.recipes.recipe_file import read_tree
from plait.schedule.plan import MOST_RANKS
from plait.settings import Settings

SHIPPED = Path(__file__).parent / "clusters"


@dataclass(frozen=True)
class Checked:
    """Predictions for a cluster that were held against measured times: of which, in words, and the mean of
    |predicted / measured - 1|."""

    source: str
    error: float


@dataclass(frozen=True)
class ClusterSpec:
    """`nodes` equal nodes.

    intra: between devices of a node, of each device
    inter: into or out of a node, shared by its devices
    host:  between a device and its node's memory
    price_per_device_hour: in any currency; None: not stated
    checked: how wrong predictions with these numbers were; None: not stated
    """

    nodes: int
    devices_per_node: int
    device: Device
    intra: Link
    inter: Link
    host: Link
    price_per_device_hour: float | None = None
    name: str = ""
    software: Software = DEFAULT
    checked: Checked | None = None

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def mesh_cluster(self) -> Cluster:
        return Cluster(self.nodes, self.devices_per_node)

    def of_size(self, devices: int) -> ClusterSpec:
        """As many of the same devices: a part of one node, or whole nodes.

        Raises:
            ConfigError: it would be neither.
        """
        per_node = self.devices_per_node
        if devices < 1 or (devices > per_node and devices % per_node):
            raise ConfigError(
                f"`devices` of the cluster `{self.name}`: expected at most {per_node}, the devices of a node, or a "
                f"multiple of it, found {devices}"
            )
        return replace(self, nodes=max(1, devices // per_node), devices_per_node=min(devices, per_node))


class _DeviceKeys(Settings):
    name: str = "device"
    tflops: float = Field(gt=0)
    tflops_float32: float | None = Field(None, gt=0)
    memory_gib: float = Field(gt=0)
    memory_gb_per_s: float = Field(gt=0)
    launch_us: float = Field(5.0, ge=0)

    def device(self) -> Device:
        return Device(
            self.name,
            self.tflops * TERA,
            int(self.memory_gib * GIB),
            self.memory_gb_per_s * GIGA,
            self.launch_us / 1e6,
            (self.tflops_float32 or 0.0) * TERA,
        )


class _LinkKeys(Settings):
    gb_per_s: float = Field(gt=0)
    latency_us: float = Field(ge=0)

    def link(self) -> Link:
        return Link(self.gb_per_s * GIGA, self.latency_us / 1e6)


class _SoftwareKeys(Settings):
    products: float = Field(Software.products, gt=0, le=1)
    memory: float = Field(Software.memory, gt=0, le=1)
    links: float = Field(Software.links, gt=0, le=1)
    layer_us: float = Field(Software.layer_s * 1e6, ge=0)
    hop_us: float = Field(Software.hop_s * 1e6, ge=0)
    micro_batches_per_stage: int = Field(Software.micro_batches_per_stage, ge=1)
    decode_groups_per_stage: int | None = Field(Software.decode_groups_per_stage, ge=0)
    pool_share: float = Field(Software.pool_share, ge=0, le=1)
    switch_us: float = Field(Software.switch_s * 1e6, ge=0)
    pack_gb_per_s: float = Field(Software.pack_bandwidth / GIGA, ge=0)

    def software(self) -> Software:
        return Software(
            self.products,
            self.memory,
            self.links,
            self.layer_us / 1e6,
            self.hop_us / 1e6,
            self.micro_batches_per_stage,
            self.decode_groups_per_stage,
            self.pool_share,
            self.switch_us / 1e6,
            self.pack_gb_per_s * GIGA,
        )


class _CalibrationKeys(Settings):
    source: str = Field(min_length=1)
    error: float = Field(ge=0)

    def checked(self) -> Checked:
        return Checked(self.source, self.error)


class ClusterKeys(Settings):
    """Keys of a cluster file."""

    nodes: int = Field(1, ge=1, le=MOST_RANKS)
    devices_per_node: int = Field(ge=1, le=MOST_RANKS)
    device: str | _DeviceKeys
    intra: _LinkKeys
    inter: _LinkKeys
    host: _LinkKeys
    price_per_device_hour: float | None = Field(None, ge=0)
    software: _SoftwareKeys = Field(default_factory=lambda: _SoftwareKeys.model_validate({}))
    calibration: _CalibrationKeys | None = None


_SECTIONS: Mapping[str, type[Settings]] = {
    "device": _DeviceKeys,
    "intra": _LinkKeys,
    "inter": _LinkKeys,
    "host": _LinkKeys,
    "software": _SoftwareKeys,
    "calibration": _CalibrationKeys,
}


def read_cluster(name_or_path: str, devices: int | None = None) -> ClusterSpec:
    """The cluster of a file, or of a name such as `8xA100-80G`.

    Args:
        devices: as many in place of those of the file: a part of one node, or whole nodes.

    Raises:
        ConfigError: there is no such file or name, a key is unknown or missing, or a value does not fit (the key is
            named).
    """
    path = Path(os.path.expanduser(name_or_path))
    named = re.fullmatch(r"(\d{1,5})x(.+)", name_or_path)
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        spec = _of_file(path, name_or_path)
    elif named is not None and named[2] in names():
        spec = replace(_of_file(SHIPPED / f"{named[2]}.yaml", named[2]), name=named[2]).of_size(int(named[1]))
    else:
        device = named[2] if named is not None else name_or_path.removeprefix("x")
        longer = next((name for name in names() if name.startswith(device)), None)
        near = nearest(device, names()) if longer is None else f"; did you mean `{longer}`?"
        raise ConfigError(
            f"cluster: expected COUNTxDEVICE with a device of {', '.join(names())}, or a YAML file, found "
            f"`{name_or_path}`{near}"
        )
    spec = spec if devices is None else spec.of_size(devices)
    return replace(spec, name=f"{spec.num_devices}x{spec.name}" if spec.name in names() else spec.name)


def names() -> tuple[str, ...]:
    """Names of the devices whose clusters ship with plait."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.yaml")))


def _of_file(path: Path, name: str) -> ClusterSpec:
    try:
        keys = _validated(read_tree(path, "file"))
    except ConfigError as error:
        raise ConfigError(f"cluster `{name}`: {error}") from None
    if isinstance(keys.device, str):
        device = DEVICES.get(keys.device)
        if device is None:
            raise ConfigError(
                f"cluster `{name}`: key `device`: expected one of {', '.join(DEVICES)}, or its numbers "
                f"(tflops, memory_gib, memory_gb_per_s), found `{keys.device}`{nearest(keys.device, tuple(DEVICES))}"
            )
    else:
        device = keys.device.device()
    if keys.nodes * keys.devices_per_node > MOST_RANKS:
        raise ConfigError(
            f"cluster `{name}`: expected at most {MOST_RANKS} devices, found `nodes` {keys.nodes} x "
            f"`devices_per_node` {keys.devices_per_node}"
        )
    return ClusterSpec(
        keys.nodes,
        keys.devices_per_node,
        device,
        keys.intra.link(),
        keys.inter.link(),
        keys.host.link(),
        keys.price_per_device_hour,
        path.stem,
        keys.software.software(),
        keys.calibration.checked() if keys.calibration is not None else None,
    )


def _validated(tree: Mapping[str, Any]) -> ClusterKeys:
    _check_alike(tree)
    _check_names(tree, ClusterKeys, "")
    keys, section = dict(tree), "device."
    try:
        if isinstance(keys.get("device"), Mapping):
            keys["device"] = _DeviceKeys.model_validate(keys["device"])
        section = ""
        return ClusterKeys.model_validate(keys)
    except ValidationError as error:
        raise ConfigError(_explained(error, section)) from None


def _check_alike(tree: Mapping[str, Any]) -> None:
    """Raises ConfigError where a file lists nodes, or devices, of several kinds."""
    for key in ("nodes", "devices_per_node", "device"):
        if isinstance(tree.get(key), list):
            raise ConfigError(
                f"key `{key}`: all devices of a cluster are of one kind, found a list; describe those of one kind, or "
                "of all the slowest with the least memory, for which plans fit and take no longer on the others"
            )


def _check_names(tree: Mapping[str, Any], keys: type[Settings], prefix: str) -> None:
    for name, value in tree.items():
        if name not in keys.model_fields:
            raise ConfigError(f"unknown key `{prefix}{name}`{nearest(name, tuple(keys.model_fields))}")
        section = None if prefix else _SECTIONS.get(name)
        if section is not None and isinstance(value, Mapping):
            _check_names(value, section, f"{name}.")
        elif section is not None and not (name == "device" and isinstance(value, str)):
            raise ConfigError(f"`{name}` is a section of keys, found {shown(value)}")


def _explained(error: ValidationError, section: str) -> str:
    """The first thing that is wrong, with its key."""
    detail = error.errors()[0]
    key = section + ".".join(map(str, detail["loc"]))
    if detail["type"] == "missing":
        return f"key `{key}` is missing"
    return f"key `{key}`: {detail['msg'][:1].lower()}{detail['msg'][1:]}, found {shown(detail['input'])}"
