"""Seconds of rows between calls: samples and columns go through rank 0, which runs the flow's own functions.
Torch-free.

Ids and numbers take eight bytes each, as they travel (`workers.messages`); what a token was drawn from, and by which
experts, goes with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.cost.cluster import ClusterSpec
from plait.cost.kept_sets import KeptSets
from plait.cost.layer_times import Terms
from plait.cost.lengths import SampleLengths
from plait.cost.workload import Samples

ITEM_BYTES = 8


def generated_bytes(lengths: SampleLengths, samples: Samples, sets: KeptSets) -> float:
    """What generation sends of all samples: prompts there, responses, their log-probs and their sets back."""
    ids = ITEM_BYTES * (samples.prompts * lengths.prompts.mean + 2 * samples.count * lengths.responses.mean)
    # A prompt's experts come with each of its samples: these end one after another.
    of_sample = lengths.responses.mean * sets.sent_bytes + lengths.prompts.mean * sets.experts
    return ids + samples.count * of_sample


def scored_bytes(lengths: SampleLengths, samples: Samples, numbers: int, sets: KeptSets) -> float:
    """What scoring sends of all samples: ids and sets there, so many numbers for each token of a response back."""
    of_token = ITEM_BYTES * (1 + numbers) + sets.sent_bytes
    return samples.count * ((ITEM_BYTES + sets.experts) * lengths.prompts.mean + of_token * lengths.responses.mean)


def trained_bytes(lengths: SampleLengths, samples: Samples, numbers: int, sets: KeptSets) -> float:
    """What training is sent of all samples: ids, log-probs, sets and so many further numbers for each token of a
    response."""
    of_token = ITEM_BYTES * (2 + numbers) + sets.sent_bytes
    return samples.count * ((ITEM_BYTES + sets.experts) * lengths.prompts.mean + of_token * lengths.responses.mean)


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
