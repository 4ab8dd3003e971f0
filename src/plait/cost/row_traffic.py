"""Seconds of rows between calls: samples and columns go through rank 0, which runs the flow's own functions.
Torch-free.

Ids and numbers take eight bytes each, as they travel (`workers.messages`).
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.cost.cluster import ClusterSpec
from plait.cost.layer_times import Terms
from plait.cost.lengths import SampleLengths
from plait.cost.workload import Samples

ITEM_BYTES = 8


def generated_bytes(lengths: SampleLengths, samples: Samples) -> float:
    """What generation sends of all samples: prompts there, responses and their log-probs back."""
    return ITEM_BYTES * (samples.prompts * lengths.prompts.mean + 2 * samples.count * lengths.responses.mean)


def scored_bytes(lengths: SampleLengths, samples: Samples, numbers: int) -> float:
    """What scoring sends of all samples: ids there, so many numbers for each token of a response back."""
    return ITEM_BYTES * samples.count * (lengths.prompts.mean + (1 + numbers) * lengths.responses.mean)


def trained_bytes(lengths: SampleLengths, samples: Samples, numbers: int) -> float:
    """What training is sent of all samples: ids, log-probs and so many further numbers for each token of a response."""
    return ITEM_BYTES * samples.count * (lengths.prompts.mean + (2 + numbers) * lengths.responses.mean)


def rows_traffic(cluster: ClusterSpec, ranks: Sequence[int], num_bytes: float, *, copies: int) -> Terms:
    """One of the ranks of a call has its rows at hand, the others get theirs one after the other over the link to their
    host, or, where there are several nodes, over that between nodes as far as they are elsewhere.

    Args:
        num_bytes: of all samples, of which each dp rank gets its share.
        copies: ranks that get the same share.
    """
    size = len(ranks)
    if size == 1:
        return {}
    cluster = cluster.among((0, *ranks))
    sent = num_bytes * copies * (size - 1) / size
    far = (cluster.nodes - 1) / cluster.nodes
    seconds = (1 - far) * sent / (cluster.host.bandwidth * cluster.software.links)
    seconds += far * sent / (cluster.inter.bandwidth * cluster.software.links)
    latency = cluster.inter.latency_s if far else cluster.host.latency_s
    return {"rows": seconds + (size - 1) * latency}
