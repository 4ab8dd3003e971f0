"""LoRA as a recipe states it. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from plait.settings import Settings


class LoraSettings(Settings):
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): y = W x + (alpha / rank) · B A x with W frozen.

    There is no dropout: the log-probs of training would not be those of the engine.
    """

    rank: int = Field(default=0, ge=0, description="rank of the adapters; 0: none, all weights are trained")
    alpha: float | None = Field(
        default=None, gt=0, description="the adapters are scaled by alpha / rank; unset: 2 · rank"
    )
    target_modules: tuple[str, ...] | Literal["all-linear"] = Field(
        default="all-linear",
        description="names of the adapted linear layers, such as q_proj; all-linear: every one of the decoder layers",
    )

    def check_read(self) -> None:
        self._check_switch("rank", "`lora.rank` above 0", "alpha", "target_modules")

    @property
    def scaling(self) -> float:
        """alpha / rank."""
        assert self.rank > 0, "no adapter has rank 0"
        return self.effective_alpha / self.rank

    @property
    def effective_alpha(self) -> float:
        return 2.0 * self.rank if self.alpha is None else self.alpha


NO_LORA = LoraSettings()
"""All weights are trained."""
