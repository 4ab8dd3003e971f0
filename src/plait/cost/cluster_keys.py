"""Keys of a cluster file, as strict as those of a recipe: a device by name or by numbers, nodes of one kind or of
several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from plait.cost.hardware import DEVICES, GIB, GIGA, TERA, Device, Link, Software
from plait.errors import ConfigError
from plait.recipes.keys import nearest, shown
from plait.schedule.plan import MOST_RANKS
from plait.settings import Settings, said_of_value

Keys = TypeVar("Keys", bound=Settings)


class DeviceKeys(Settings):
    name: str = "device"
    tflops: float = Field(gt=0)
    tflops_float32: float | None = Field(default=None, gt=0)
    memory_gib: float = Field(gt=0)
    memory_gb_per_s: float = Field(gt=0)
    launch_us: float = Field(default=5.0, ge=0)

    def device(self) -> Device:
        return Device(
            self.name,
            self.tflops * TERA,
            int(self.memory_gib * GIB),
            self.memory_gb_per_s * GIGA,
            self.launch_us / 1e6,
            (self.tflops_float32 or 0.0) * TERA,
        )


class LinkKeys(Settings):
    gb_per_s: float = Field(gt=0)
    latency_us: float = Field(ge=0)

    def link(self) -> Link:
        return Link(self.gb_per_s * GIGA, self.latency_us / 1e6)


class SoftwareKeys(Settings):
    products: float = Field(default=Software.products, gt=0, le=1)
    memory: float = Field(default=Software.memory, gt=0, le=1)
    links: float = Field(default=Software.links, gt=0, le=1)
    layer_us: float = Field(default=Software.layer_s * 1e6, ge=0)
    hop_us: float = Field(default=Software.hop_s * 1e6, ge=0)
    micro_batches_per_stage: int = Field(default=Software.micro_batches_per_stage, ge=1)
    decode_groups_per_stage: int | None = Field(default=Software.decode_groups_per_stage, ge=0)
    pool_share: float = Field(default=Software.pool_share, ge=0, le=1)
    switch_us: float = Field(default=Software.switch_s * 1e6, ge=0)
    pack_gb_per_s: float = Field(default=Software.pack_bandwidth / GIGA, ge=0)

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


class CalibrationKeys(Settings):
    source: str = Field(min_length=1)
    error: float = Field(ge=0)


class NodesKeys(Settings):
    """Nodes that are alike, of a file that lists several kinds; links and price None: those of the file."""

    count: int = Field(default=1, ge=1, le=MOST_RANKS)
    devices: int = Field(ge=1, le=MOST_RANKS)
    device: str | DeviceKeys
    intra: LinkKeys | None = None
    inter: LinkKeys | None = None
    host: LinkKeys | None = None
    price_per_device_hour: float | None = Field(default=None, ge=0)


class FileKeys(Settings):
    """Keys of a cluster file, whatever its nodes are."""

    price_per_device_hour: float | None = Field(default=None, ge=0)
    software: SoftwareKeys = Field(default_factory=lambda: SoftwareKeys.model_validate({}))
    calibration: CalibrationKeys | None = None


class _AlikeKeys(FileKeys):
    """Keys of a file whose nodes are alike."""

    nodes: int = Field(default=1, ge=1, le=MOST_RANKS)
    devices_per_node: int = Field(ge=1, le=MOST_RANKS)
    device: str | DeviceKeys
    intra: LinkKeys
    inter: LinkKeys
    host: LinkKeys


class _KindsKeys(FileKeys):
    """Keys of a file that lists nodes of several kinds, beside that list; links of those that state none."""

    intra: LinkKeys | None = None
    inter: LinkKeys | None = None
    host: LinkKeys | None = None


_SECTIONS: Mapping[str, type[Settings]] = {
    "device": DeviceKeys,
    "intra": LinkKeys,
    "inter": LinkKeys,
    "host": LinkKeys,
    "software": SoftwareKeys,
    "calibration": CalibrationKeys,
}
_LINKS = ("intra", "inter", "host")


def read_keys(tree: Mapping[str, Any]) -> tuple[FileKeys, tuple[NodesKeys, ...]]:
    """What a file says of the whole cluster, and its kinds of nodes, each with its own device and links.

    Raises:
        ConfigError: a key is unknown or missing, or a value does not fit (the key is named).
    """
    if isinstance(tree.get("nodes"), list):
        return _kinds(tree)
    if isinstance(tree.get("device"), list):
        raise ConfigError(
            "key `device`: expected one device, found a list; nodes of several kinds are a list in `nodes`, each with "
            "its `count`, `devices` and `device`, and devices of one node are of one kind"
        )
    keys = _validated(tree, _AlikeKeys, "")
    links = {name: getattr(keys, name) for name in _LINKS}
    _check_device(keys.device, "device")
    _check_count(
        keys.nodes * keys.devices_per_node, f"`nodes` {keys.nodes} x `devices_per_node` {keys.devices_per_node}"
    )
    only = NodesKeys.model_construct(count=keys.nodes, devices=keys.devices_per_node, device=keys.device, **links)
    return keys, (only.model_copy(update={"price_per_device_hour": keys.price_per_device_hour}),)


def _kinds(tree: Mapping[str, Any]) -> tuple[FileKeys, tuple[NodesKeys, ...]]:
    """Those of a file whose `nodes` are a list."""
    for key in ("devices_per_node", "device"):
        if key in tree:
            raise ConfigError(f"key `{key}`: where `nodes` is a list, each of its entries says it; leave it out")
    file = _validated({key: value for key, value in tree.items() if key != "nodes"}, _KindsKeys, "")
    kinds = []
    for number, entry in enumerate(tree["nodes"]):
        if not isinstance(entry, Mapping):
            raise ConfigError(f"key `nodes.{number}`: expected the keys of some nodes, found {shown(entry)}")
        kind = _validated(entry, NodesKeys, f"nodes.{number}.")
        _check_device(kind.device, f"nodes.{number}.device")
        given = {name: getattr(kind, name) or getattr(file, name) for name in _LINKS}
        if (missing := next((name for name in _LINKS if given[name] is None), None)) is not None:
            raise ConfigError(
                f"key `nodes.{number}.{missing}` is missing; state it there, or `{missing}` for all nodes"
            )
        price = file.price_per_device_hour if kind.price_per_device_hour is None else kind.price_per_device_hour
        kinds.append(kind.model_copy(update={**given, "price_per_device_hour": price}))
    if not kinds:
        raise ConfigError("key `nodes`: expected nodes of one kind at least, found an empty list")
    if len(sizes := {kind.devices for kind in kinds}) > 1:
        raise ConfigError(
            f"key `nodes`: expected as many `devices` in each node, found {', '.join(map(str, sorted(sizes)))}; "
            "plans divide equal nodes, so describe larger ones as several nodes of the smallest's size"
        )
    _check_count(sum(kind.count * kind.devices for kind in kinds), "those of `nodes` together")
    return file, tuple(kinds)


def device_of(named: str | DeviceKeys) -> Device:
    return DEVICES[named] if isinstance(named, str) else named.device()


def _check_device(named: str | DeviceKeys, key: str) -> None:
    if isinstance(named, str) and named not in DEVICES:
        raise ConfigError(
            f"key `{key}`: expected one of {', '.join(DEVICES)}, or its numbers (tflops, memory_gib, memory_gb_per_s), "
            f"found `{named}`{nearest(named, tuple(DEVICES))}"
        )


def _check_count(devices: int, found: str) -> None:
    if devices > MOST_RANKS:
        raise ConfigError(f"expected at most {MOST_RANKS} devices, found {found}")


def _validated(tree: Mapping[str, Any], keys: type[Keys], prefix: str) -> Keys:
    _check_names(tree, keys, prefix, _SECTIONS)
    given, section = dict(tree), f"{prefix}device."
    try:
        if isinstance(given.get("device"), Mapping):
            given["device"] = DeviceKeys.model_validate(given["device"])
        section = prefix
        return keys.model_validate(given)
    except ValidationError as error:
        raise ConfigError(_explained(error, section)) from None


def _check_names(
    tree: Mapping[str, Any], keys: type[Settings], prefix: str, sections: Mapping[str, type[Settings]]
) -> None:
    for name, value in tree.items():
        if name not in keys.model_fields:
            names = tuple(keys.model_fields)
            raise ConfigError(f"unknown key `{prefix}{name}`{nearest(name, names) or f'; it has {_listed(names)}'}")
        section = sections.get(name)
        if section is not None and isinstance(value, Mapping):
            _check_names(value, section, f"{prefix}{name}.", {})
        elif section is not None and not (name == "device" and isinstance(value, str)):
            raise ConfigError(f"`{prefix}{name}` is a section of keys, found {shown(value)}")


def _explained(error: ValidationError, section: str) -> str:
    """All keys that are missing, else the first thing that is wrong, with its key."""
    details = error.errors()
    keys = [section + ".".join(map(str, detail["loc"])) for detail in details]
    missing = [key for key, detail in zip(keys, details, strict=True) if detail["type"] == "missing"]
    if missing:
        words = ("key", "is") if len(missing) == 1 else ("keys", "are")
        return f"{words[0]} {_listed(missing)} {words[1]} missing (docs/predictions.md)"
    return f"key `{keys[0]}`: {said_of_value(details[0])}, found {shown(details[0]['input'])}"


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)
