"""What a recipe asks of the end of its rollouts (`fusion`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FusionRule:
    """When the last samples of a rollout are gathered, and ranks that have none left score.

    share:   of a rollout's samples, the unfinished at which that is, as the recipe states it; 0: it states none
    is_open: each step of a run decides, where the plan lets it be
    """

    share: float = 0.0
    is_open: bool = False

    @classmethod
    def of(cls, stated: float | str) -> FusionRule:
        """By what a recipe's key has: `auto`, `off`, or a share."""
        return cls(share=stated) if isinstance(stated, float) else cls(is_open=stated == "auto")

    @property
    def is_stated(self) -> bool:
        return self.share > 0

    @property
    def may_fuse(self) -> bool:
        """Whether samples may be gathered at all, be that a step's to decide."""
        return self.is_stated or self.is_open
