"""What the GPUs of one machine send each other: as it was measured over NCCL, else by their kind. Torch-free.

A kind that plait knows has the link between devices of a node that its cluster file states (`cost/clusters`): NVLink by
NVIDIA's data sheets, half of a number that counts both directions, or PCIe 4.0 x16. Cards of such a kind in a PCIe slot
(`NVIDIA H100 PCIe`) have the link to their host: bridges join two of them at most, and nobody says where they are. Of
either NCCL gets `Software.links`, 0.8: of NVLink's 450 GB/s its protocol leaves 370 (NVIDIA/nccl-tests, issue 212). Two
A100 get 208 of 300, eight get 200 (issues 178 and 149). Other kinds are taken to have PCIe 3.0 x16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from plait.cost.cluster_file import read_cluster
from plait.cost.hardware import DEFAULT, GIB, Link, known_device
from plait.cost.profile import Profile

UNKNOWN = Link(12e9, 15e-6)
"""Between GPUs that plait does not know: most of the 15.75 GB/s of PCIe 3.0 x16, by way of the host."""


@dataclass(frozen=True)
class GpuLinks:
    """
    link:  in numbers of the hardware
    share: of its bandwidth that programs get; 1 where the link was measured
    whose: the numbers are, in words, where they were not measured; empty: they were
    """

    link: Link
    share: float
    whose: str

    @property
    def effective(self) -> Link:
        return Link(self.link.bandwidth * self.share, self.link.latency_s)

    @property
    def label(self) -> str:
        """Where the numbers come from, in words."""
        numbers = f"{self.effective.bandwidth / 1e9:.3g} GB/s and {self.link.latency_s * 1e6:.0f} us"
        if not self.whose:
            return f"links between GPUs as they were measured over NCCL, {numbers}"
        return f"links between GPUs not measured, taken as {numbers}, {self.whose}"


@cache
def links_of_kind(name: str, memory_bytes: int) -> GpuLinks:
    """As GPUs of this kind have it, nothing measured.

    Args:
        name: of the driver.
        memory_bytes: of each.
    """
    known = known_device(name, memory_bytes)
    if known is None:
        return GpuLinks(UNKNOWN, DEFAULT.links, f"an estimate, as plait does not know the {name}")
    cluster = read_cluster(f"1x{known.name}")
    link, where = (cluster.host, " in a PCIe slot") if "pcie" in name.lower() else (cluster.intra, "")
    return GpuLinks(link, DEFAULT.links, f"a share of vendors' numbers of {known.name}{where}")


def links_of(profile: Profile) -> GpuLinks:
    """As two GPUs of a machine were measured to have it in sums, else as its kind has it."""
    if profile.all_reduce is not None:
        return GpuLinks(profile.all_reduce.link, 1.0, "")
    return links_of_kind(profile.machine, int(profile.memory_gib * GIB))
