"""Responses behind other prompts than those that they were drawn or given for. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from plait.data.records import Prompt
from plait.data.rows import Rows


@dataclass(frozen=True)
class WrittenPrompts:
    """A prompt for each of some samples, which a function of the flow has written."""

    rows: Rows
    """The samples."""
    prompts: Mapping[str, Prompt]
    """Uid of each sample → its prompt: of the uid of its own prompt, and of the row of the data that this is of, where
    `prompt` is what was written."""

    def behind(self, rows: Rows) -> Rows:
        """Samples of `rows`, in their order, each behind the prompt that was written for it. Those that read the same
        tokens are a group, which is computed once, whatever prompts they come from: their uids are numbers of such
        groups, by the order of samples. Where tokens of the response went to experts is not said: that was behind
        another prompt."""
        groups: dict[tuple[int, ...], int] = {}
        counts = Counter[int]()
        samples = list(rows.samples)
        for place in rows.order:
            sample = samples[place]
            prompt = self.prompts[sample.uid]
            uid = groups.setdefault(prompt.token_ids, len(groups))
            samples[place] = replace(sample, prompt=replace(prompt, uid=uid), index=counts[uid], experts=None)
            counts[uid] += 1
        return Rows(tuple(samples))
