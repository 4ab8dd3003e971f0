"""LoRA as a recipe states it. No torch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from pydantic import Field, field_validator

from plait.errors import ModelError
from plait.settings import Settings

ALL_LINEAR: Literal["all-linear"] = "all-linear"


def check_peft() -> None:
    """Check that peft is installed; imports nothing.

    Raises:
        ModelError: it is not.
    """
    if find_spec("peft") is None:
        raise ModelError("lora: adapters need the package peft; install plait[lora], or set lora.rank to 0.")


def target_of(name: str) -> str:
    """What a recipe calls a parameter of experts: peft's `mlp.experts.down_proj` is `experts.down_proj`. A name without
    a dot, as linear layers have, is itself."""
    return ".".join(name.split(".")[-2:])


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
        description="names of the adapted linear layers, such as q_proj, and of experts, such as experts.down_proj; "
        "all-linear: every linear layer of the decoder layers, to which a list may add names of experts",
    )

    @field_validator("target_modules")
    @classmethod
    def _name_experts(cls, stated: tuple[str, ...] | str) -> tuple[str, ...] | str:
        if isinstance(stated, str) or stated == (ALL_LINEAR,):
            return ALL_LINEAR
        if numbered := [name for name in stated if any(part.isdigit() for part in name.split("."))]:
            raise ValueError(
                f"expected names without a number, as each holds in every decoder layer, found {numbered[0]}; write "
                f"{target_of(numbered[0])}"
            )
        if ALL_LINEAR in stated and (linear := [name for name in stated if "." not in name and name != ALL_LINEAR]):
            raise ValueError(f"expected all-linear with names of experts alone, found {', '.join(linear)} beside it")
        return tuple(map(target_of, stated))

    def check_read(self) -> None:
        self._check_switch("rank", "`lora.rank` above 0", "alpha", "target_modules")

    @property
    def linear(self) -> tuple[str, ...] | Literal["all-linear"]:
        """Names of the linear layers."""
        if ALL_LINEAR in self.target_modules:
            return ALL_LINEAR
        return tuple(name for name in self.target_modules if "." not in name)

    @property
    def experts(self) -> tuple[str, ...]:
        """Names of parameters of experts, which have a dot."""
        stated = self.target_modules
        return () if isinstance(stated, str) else tuple(name for name in stated if "." in name)

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
