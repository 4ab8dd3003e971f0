"""The average micro-batch of each call, and how many there are."""

from __future__ import annotations

from math import ceil

from plait.cost.flow_calls import FlowCalls
from plait.cost.hardware import Software
from plait.cost.layer_times import Micro
from plait.cost.micro_batch import pieces, share_of
from plait.cost.wide_columns import head_forwards
from plait.dataflow import CallKind, Node
from plait.layout.mesh import Layout, Parallelism
from plait.schedule.needs import may_stream


class MicroBatchSplit:
    """How the samples of a flow's calls are split into micro-batches, on average."""

    def __init__(self, calls: FlowCalls, software: Software) -> None:
        self._workload, self._shapes, self._flow = calls.workload, calls.shapes, calls.flow
        self._samples, self._lengths, self._software = calls.samples, calls.lengths, software

    def share(self, node: Node, dp: int) -> int:
        """Samples of one optimizer step of a training call that the copy with most of them has."""
        samples, options = self._samples[node.id], node.training
        together = samples.per_prompt if options.whole_groups else 1
        return share_of(samples.count, options.mini_batches, dp, together)

    def micro(self, node: Node, share: int, layout: Layout, budget: int, count: int = 0) -> tuple[Micro, int]:
        """The average micro-batch of a copy's share of samples, and their number, if that is not given (0).

        Samples of a prompt stay together, so that it is computed once, unless a pipeline is filled better by pieces of
        them, or a share is less than a prompt's samples. Each micro-batch has the root of the prompts once.
        """
        lengths, per_prompt = self._lengths[node.id], min(self._samples[node.id].per_prompt, share)
        p, r, wanted = lengths.prompts, lengths.responses, self.least(layout.parallelism)
        whole = node.kind is CallKind.TRAIN and node.training.whole_groups
        prompts, least = pieces(share, per_prompt, p.mean - p.root, r.mean, wanted, whole)
        tokens = prompts * (p.mean - p.root) + share * r.mean
        if not count:
            count = max(least, min(ceil(prompts) if whole else share, ceil(tokens / max(1, budget - p.root))))
        near = lengths.near_pairs(self._shapes[str(node.role)].windows, prompts, share, count)
        pairs, heads = lengths.pairs(prompts, share, count), head_forwards(node)
        trains, workload = node.kind is CallKind.TRAIN, self._workload
        micro = Micro(
            tokens + count * p.root,
            pairs,
            share * r.mean,
            near,
            heads,
            balanced=share if trains and node.role in workload.balanced else 0,
            sequence_parallel=trains and workload.sequence_parallel,
            gathered_again=not workload.checkpoint_activations,
        )
        return micro / count, count

    def least(self, sizes: Parallelism) -> int:
        """Micro-batches that are wanted."""
        return self._software.micro_batches_per_stage * sizes.pp if sizes.pp > 1 else 1

    def small_parts(self, node: Node) -> int:
        """Forwards of a copy that a call in parts has more, about: the first parts of the first model that scores these
        samples are small, and more of the last one's (`policy.score_parts`)."""
        calls = (other for other in self._flow.nodes if other.rows == node.rows and may_stream(other, self._flow))
        order = [call.id for call in calls if str(call.role) in self._shapes]
        return (node.id in order[:1]) + 2 * (node.id in order[-1:])
