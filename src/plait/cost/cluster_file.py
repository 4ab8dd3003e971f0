"""Reads clusters from small YAML files, as strictly as recipes.

A name such as `16xH100` stands for so many devices of a file that ships with plait (`cost/clusters/H100.yaml`).
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from plait.cost.cluster import Checked, ClusterSpec, NodeKind
from plait.cost.cluster_keys import device_of, read_keys
from plait.errors import ConfigError
from plait.paths import at_home
from plait.recipes.keys import nearest
from plait.recipes.recipe_file import read_tree

SHIPPED = Path(__file__).parent / "clusters"


def read_cluster(name_or_path: str, devices: int | None = None) -> ClusterSpec:
    """The cluster of a file, or of a name such as `8xA100-80G`.

    Args:
        devices: as many in place of those of the file: a part of one node, or whole nodes.

    Raises:
        ConfigError: there is no such file or name, a key is unknown or missing, or a value does not fit (the key is
            named).
    """
    path = Path(at_home(name_or_path, "cluster"))
    named = re.fullmatch(r"(\d{1,5})x(.+)", name_or_path)
    if os.path.isfile(path) or path.suffix in (".yaml", ".yml"):
        spec = _of_file(path, name_or_path)
    elif named is not None and named[2] in names():
        spec = replace(_of_file(SHIPPED / f"{named[2]}.yaml", named[2]), name=named[2]).of_size(int(named[1]))
        if devices is not None and devices > spec.num_devices:
            raise ConfigError(
                f"`devices` of the cluster `{name_or_path}`: expected at most {spec.num_devices}, found {devices}; "
                f"give --cluster {devices}x{named[2]}, or fewer devices"
            )
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
        file, nodes = read_keys(read_tree(path, "file"))
    except ConfigError as error:
        raise ConfigError(f"cluster `{name}`: {error}") from None
    kinds = []
    for keys in nodes:
        intra, inter, host = (link.link() for link in (keys.intra, keys.inter, keys.host) if link is not None)
        kinds.append(NodeKind(keys.count, device_of(keys.device), intra, inter, host, keys.price_per_device_hour))
    spec = ClusterSpec.of_kinds(kinds, nodes[0].devices, path.stem, file.software.software())
    told = file.calibration
    return spec if told is None else replace(spec, checked=Checked(told.source, told.error))
