"""Seconds of a generation before an instance decodes: weights are packed, and prompts computed. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil

from plait.cost.costs import PROMPTS
from plait.cost.decoding import DRAFT_MODEL, Drafting
from plait.cost.layer_times import LayerTimes, Micro, Terms, added, total
from plait.cost.passes import Passes
from plait.cost.profile import Profile
from plait.cost.workload import Samples, Workload
from plait.layout.mesh import Parallelism
from plait.models.shape import ModelShape


class Prefill:
    """Seconds of instances before they decode.

    Args:
        shapes, held_bytes, profile: as of `Generating`.
    """

    def __init__(
        self,
        workload: Workload,
        shapes: Mapping[str, ModelShape],
        held_bytes: Callable[[str, Parallelism], tuple[int, ...]],
        profile: Profile | None,
    ) -> None:
        self._workload, self._held, self._profile = workload, held_bytes, profile
        alone = any(shape.recurrent for shape in shapes.values())  # their prompts share no beginning
        prompts = replace(workload.lengths.prompts, root=0 if alone else workload.shared_root)
        self._lengths = replace(workload.lengths, prompts=prompts)

    def seconds(
        self,
        role: str,
        passes: Passes,
        samples: Samples,
        size: int,
        groups: Callable[[int], int],
        drafting: Drafting,
    ) -> Terms:
        """Before an instance with so many samples decodes; a draft model computes the prompts, too."""
        count = size // samples.per_prompt
        prompts = {PROMPTS: self.prompts_s(passes, count, groups(size))}
        return self._drafting(added(self.packing(role, passes.times), prompts), count, drafting)

    def elsewhere(self, role: str, passes: Passes, prompts: int, drafting: Drafting) -> Terms:
        """The same where other instances compute so many prompts."""
        return self._drafting(self.packing(role, passes.times), prompts, drafting)

    def _drafting(self, terms: Terms, prompts: int, drafting: Drafting) -> Terms:
        if drafting.model is None or not drafting.drafts.passes:
            return terms
        return added(terms, {DRAFT_MODEL: self.prompts_s(drafting.model, prompts, 1)})

    def packing(self, role: str, times: LayerTimes) -> Terms:
        """Weights that are laid out anew for decoding, where the measured engine does that: by each rank its own."""
        rate = None if self._profile is None else self._profile.packing_bytes_per_s
        if rate is None:
            return {}
        return {"packing": max(self._held(role, replace(times.layout.parallelism, dp=1))) / rate * times.contention}

    def prompts_s(self, passes: Passes, prompts: int, groups: int) -> float:
        """Prompts of one instance, each computed once for all of its samples, and once for all prompts the blocks that
        they begin with."""
        lengths, most = self._lengths, self._workload.max_prefill_tokens
        tokens = prompts * lengths.prompts.mean - (prompts - 1) * lengths.prompts.root
        chunks = max(ceil(tokens / most), min(groups, prompts))
        near = lengths.near_pairs(passes.times.work.shape.windows, prompts, 0, 1)
        micro = Micro(tokens, lengths.pairs(prompts, 0, 1), prompts, near) / chunks
        return total(passes.prompts(micro, chunks, in_turn=groups == 1))
