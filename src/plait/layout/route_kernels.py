"""The choice of senders (`layout.route`), compiled by numba: a move over 512 ranks has some 600,000 messages to choose.

Ranks and nodes are numbered anew from 0, in the order of their own numbers. R ranks, N nodes, C chunks, G groups: a
group is what a class of chunks has to do with one node.
"""

# numpy's annotations do not say that an array indexed by numbers gives a number.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.compiled import njit

Ints = NDArray[np.int64]


class Groups(NamedTuple):
    """Who has and who lacks the chunks of each class, node by node.

    first:    [classes + 1] first group of each class, the nodes of which ascend
    node:     [G]
    holders:  ranks that hold it, those of group g from first_holder[g] to first_holder[g + 1]
    needers:  ranks that lack it, in the same way; both ascend
    node_of:  [R]
    is_store: [R] whether a rank is a file, which hands nothing on
    """

    first: Ints
    node: Ints
    holders: Ints
    first_holder: Ints
    needers: Ints
    first_needer: Ints
    node_of: Ints
    is_store: NDArray[np.bool_]


class Loads(NamedTuple):
    """Elements that nodes [N] and ranks [R] send and receive, as far as they have been assigned."""

    node_out: Ints
    far_out: Ints
    far_in: Ints
    near_out: Ints


class Tree(NamedTuple):
    """The messages of one chunk, while they are chosen.

    entry:   [G] rank of a group without holders to which the chunk came first; −1: none
    hops:    [R] messages between the holders and a rank that has it
    senders: [N] groups that send to others; having: [R] ranks of one group that have it; order: [max(N, R)]
    """

    entry: Ints
    hops: Ints
    senders: Ints
    having: Ints
    order: Ints


@njit()
def choose(groups: Groups, class_of: Ints, sizes: Ints, order: Ints, first_edge: Ints, sweeps: int) -> Ints:
    """[edges, 2] sender and receiver of each message, chunk after chunk, a sender never before it has the chunk.

    class_of, sizes, order: [C] class and elements of each chunk; the order in which chunks choose
    first_edge:             [C + 1] first message of each chunk, which has one for each rank that needs it
    sweeps:                 times that every chunk chooses; in the first only holders send
    """
    ranks, nodes = groups.node_of.shape[0], groups.node_of.max() + 1
    edges = np.zeros((first_edge[-1], 2), np.int64)
    zeros = np.zeros((3, ranks), np.int64)
    loads = Loads(np.zeros(nodes, np.int64), zeros[0], zeros[1], zeros[2])
    scratch = np.zeros((4, max(ranks, nodes)), np.int64)
    entry = np.full(groups.node.shape[0], -1)
    tree = Tree(entry, scratch[0], scratch[1], scratch[2], scratch[3])
    for sweep in range(sweeps):
        for chunk in order:
            mine, size = edges[first_edge[chunk] : first_edge[chunk + 1]], sizes[chunk]
            if sweep > 0:
                _add(mine, groups.node_of, -size, loads)
            low, high = groups.first[class_of[chunk]], groups.first[class_of[chunk] + 1]
            done = _enter(groups, low, high, size, sweep > 0, loads, tree, mine)
            for group in range(low, high):
                done = _hand_on(groups, group, size, sweep > 0, loads.near_out, tree, mine, done)
    return edges


@njit()
def _add(edges: Ints, node_of: Ints, size: int, loads: Loads) -> None:
    for k in range(edges.shape[0]):
        sender, receiver = edges[k, 0], edges[k, 1]
        if node_of[sender] == node_of[receiver]:
            loads.near_out[sender] += size
        else:
            loads.node_out[node_of[sender]] += size
            loads.far_out[sender] += size
            loads.far_in[receiver] += size


@njit()
def _enter(groups: Groups, low: int, high: int, size: int, forward: bool, loads: Loads, tree: Tree, edges: Ints) -> int:
    """Send a chunk once into each node that lacks it, and return in how many messages: the least loaded nodes first,
    each from the least loaded one that has it.

    low, high: the groups of its class
    forward:   whether ranks that receive the chunk may send it on, if they have less to do than its holders
    """
    num_senders = num_lacking = 0
    for group in range(low, high):
        if groups.first_holder[group] < groups.first_holder[group + 1]:
            tree.senders[num_senders] = group
            num_senders += 1
        else:
            out, at = loads.node_out[groups.node[group]], num_lacking
            while at > 0 and loads.node_out[groups.node[tree.order[at - 1]]] > out:
                tree.order[at] = tree.order[at - 1]
                at -= 1
            tree.order[at] = group
            num_lacking += 1
    for done in range(num_lacking):
        group = tree.order[done]
        entry = groups.needers[groups.first_needer[group]]
        for rank in groups.needers[groups.first_needer[group] + 1 : groups.first_needer[group + 1]]:
            if (loads.far_in[rank], loads.near_out[rank]) < (loads.far_in[entry], loads.near_out[entry]):
                entry = rank
        origin = _least_group(groups, tree.senders[:num_senders], loads.node_out, tree)
        sender = _least_holder(groups, origin, loads, tree)
        edges[done, 0], edges[done, 1] = sender, entry
        loads.node_out[groups.node[origin]] += size
        loads.far_out[sender] += size
        loads.far_in[entry] += size
        tree.entry[group] = entry
        tree.hops[entry] = (tree.hops[sender] if sender == tree.entry[origin] else 0) + 1
        if forward and not groups.is_store[entry]:
            tree.senders[num_senders] = group
            num_senders += 1
    return num_lacking


@njit()
def _least_group(groups: Groups, senders: Ints, node_out: Ints, tree: Tree) -> int:
    """The group whose node has sent least; of equal ones the one with fewest hops, then the first."""
    best, least = -1, (0, 0, 0)
    for group in senders:
        entry, node = tree.entry[group], groups.node[group]
        load = node_out[node], tree.hops[entry] if entry >= 0 else 0, node
        if best < 0 or load < least:
            best, least = group, load
    return best


@njit()
def _least_holder(groups: Groups, group: int, loads: Loads, tree: Tree) -> int:
    """The holder in a group that has sent least to other nodes, then to its own node; if no rank of the group held the
    chunk, the rank that received it first."""
    if tree.entry[group] >= 0:
        return tree.entry[group]
    best = groups.holders[groups.first_holder[group]]
    for rank in groups.holders[groups.first_holder[group] + 1 : groups.first_holder[group + 1]]:
        if (loads.far_out[rank], loads.near_out[rank]) < (loads.far_out[best], loads.near_out[best]):
            best = rank
    return best


@njit()
def _hand_on(
    groups: Groups, group: int, size: int, forward: bool, near_out: Ints, tree: Tree, edges: Ints, done: int
) -> int:
    """Send a chunk to all ranks of a group that lack it still, from those of its node that have it; return how many
    messages it has then."""
    entry, having, order, hops = tree.entry[group], tree.having, tree.order, tree.hops
    num_having = num_lacking = 0
    if entry >= 0:
        having[0], num_having = entry, 1
    else:
        for rank in groups.holders[groups.first_holder[group] : groups.first_holder[group + 1]]:
            having[num_having], hops[rank] = rank, 0
            num_having += 1
    for rank in groups.needers[groups.first_needer[group] : groups.first_needer[group + 1]]:
        if rank != entry:
            at = num_lacking
            while at > 0 and near_out[order[at - 1]] > near_out[rank]:
                order[at] = order[at - 1]
                at -= 1
            order[at] = rank
            num_lacking += 1
    for rank in order[:num_lacking]:
        sender = having[0]
        for other in having[1:num_having]:
            if (near_out[other], hops[other], other) < (near_out[sender], hops[sender], sender):
                sender = other
        edges[done, 0], edges[done, 1] = sender, rank
        done += 1
        near_out[sender] += size
        if forward:
            having[num_having], hops[rank] = rank, hops[sender] + 1
            num_having += 1
    tree.entry[group] = -1
    return done
