"""What the samples of a workload were drawn from: bytes that travel, that are read, that processes hold. Torch-free."""

from __future__ import annotations

from plait.cost.flow_calls import FlowCalls
from plait.cost.kept_sets import NO_SETS, KeptSets, held_set_bytes, reads_sets, sets_of
from plait.cost.micro_batch import share_of
from plait.cost.workload import Samples
from plait.dataflow import CallKind, Node
from plait.recipes.role_models import is_scalar


class SampleSets:
    """Those of the calls of a flow."""

    def __init__(self, calls: FlowCalls) -> None:
        flow, workload, shape_of = calls.flow, calls.workload, calls.shapes.__getitem__
        self._sets = {node.id: sets_of(flow, node, workload.sampling, shape_of) for node in flow.nodes}
        self._samples, self._lengths, self._of_device = calls.samples, calls.lengths, workload.device == "cpu"
        self._batches = workload.batches

    def sent(self, node: Node) -> KeptSets:
        """The sets of the samples that a call makes or gets."""
        return NO_SETS if node.kind is CallKind.SCORE and not reads_sets(node) else self._sets[node.id]

    def read(self, node: Node) -> KeptSets:
        """The sets of the tokens whose log-probs a call computes."""
        return NO_SETS if is_scalar(str(node.role)) else self.sent(node)

    def held(self, node: Node, copies: int) -> int:
        """Bytes of a CPU's memory of what one of so many copies or instances has of them; none of a GPU's, whose
        samples are in its host's."""
        if not self._of_device:
            return 0
        lengths = self._lengths[node.id]
        longest = lengths.prompts.longest, lengths.responses.longest
        return share_bytes(node, self._samples[node.id], self.sent(node), copies, longest)

    def held_by_all(self, node: Node) -> int:
        """Bytes of the sets of all samples of a generation that exist at the same time."""
        return self._batches * self.held(node, 1)


def share_bytes(node: Node, samples: Samples, sets: KeptSets, copies: int, longest: tuple[int, int]) -> int:
    """Bytes of a process that has what one of so many copies or instances makes or reads in a call.

    Args:
        samples: all of the call.
        longest: tokens of a prompt, and of a response, at most.
    """
    together = samples.per_prompt if node.kind is CallKind.GENERATE else 1
    share, (prompt, response) = share_of(samples.count, 1, copies, together), longest
    prompts = prompt * min(samples.prompts, -(-share // together))
    return held_set_bytes(sets, share, response, prompts)
