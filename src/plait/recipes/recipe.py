"""The recipe: everything a user says about a run.

Sections are the settings of the packages that use them. What plait derives from a recipe is never written back into it.
Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import StrEnum
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from plait.data.settings import DataSettings
from plait.errors import ConfigError
from plait.generation.settings import SamplingSettings
from plait.json_text import kind_of
from plait.models.lora_settings import LoraSettings
from plait.observe.doctor_settings import DoctorSettings
from plait.paths import named_folder, path_key
from plait.recipes.evaluation_settings import EvaluationSettings
from plait.recipes.open_keys import OpenKeys
from plait.recipes.role_settings import JudgeSettings, ReferenceSettings, ValueSettings
from plait.rewards.settings import RewardSettings, TurnSettings
from plait.schedule.fusion_rule import FusionRule
from plait.schedule.plan import MOST_RANKS
from plait.schedule.update_rule import UpdateRule
from plait.settings import Seed, Settings, word_or_number
from plait.training.settings import OptimizerSettings


class DType(StrEnum):
    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


_FUSION = word_or_number(("auto", "off"), float, lambda s: 0 < s <= 1, "auto, off, or a share above 0 and at most 1")


class CheckpointSettings(Settings):
    every: int = Field(default=25, ge=0, description="save every N steps; 0: only at the end or when stopped")
    keep_last: int = Field(default=2, ge=1, description="newest checkpoints kept")


MOST_PROMPTS = 1 << 17
"""In a step: more are predicted in minutes, and are likely a number of tokens."""

SECTIONS = ("options", "reward", "cost", "reference", "lora", "evaluation", "samples_per_prompt")
"""Those with keys that have no effect without others, or with some flows."""


class Recipe(OpenKeys):
    """A run. `options` holds the algorithm's own keys and is checked against its options class."""

    model: str = Field(description="smollm2-135m-instruct, a local folder, or a hub id")
    algorithm: str = Field(default="grpo", description="a built-in name, or FILE.py:FUNCTION")
    options: dict[str, Any] = Field(default_factory=dict, description="keys of the algorithm")
    steps: int = Field(
        default=100, ge=1, description="training steps: one batch made or read, scored and trained on each"
    )
    epochs: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="in place of `steps`: as many steps as N passes over the data take",
    )
    prompts_per_step: int = Field(
        default=16, ge=1, le=MOST_PROMPTS, description="prompts (examples, pairs, labelled responses) in a step"
    )
    samples_per_prompt: int = Field(default=8, ge=1, description="responses drawn per prompt")
    data: DataSettings
    pretraining: DataSettings | None = Field(
        default=None, description="data of the examples that a flow trains on beside its prompts"
    )
    reward: RewardSettings = RewardSettings()
    cost: RewardSettings = RewardSettings()
    critic: ValueSettings = ValueSettings()
    cost_critic: ValueSettings = ValueSettings()
    reference: ReferenceSettings = ReferenceSettings()
    judge: JudgeSettings = JudgeSettings()
    lora: LoraSettings = LoraSettings()
    sampling: SamplingSettings = SamplingSettings()
    turns: TurnSettings = TurnSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    doctor: DoctorSettings = DoctorSettings()
    run_dir: Path = Field(default=Path("runs/run"), description="folder that the run writes")
    overwrite: bool = Field(default=False, description="clear a run that is already in run_dir")
    seed: Seed = Field(default=0, description="of everything that is drawn")
    dtype: DType = Field(
        default=DType.BFLOAT16, description="of weights in compute; masters are float32 (float64 for float64)"
    )
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="cpu or cuda")
    plan: str = Field(
        default="auto",
        description="where calls run: auto (found before the run, of several devices), colocated, split, standalone, "
        "or a plan file (docs/plans.md)",
    )
    fusion: Annotated[float | Literal["auto", "off"], _FUSION] = Field(
        default="auto",
        description="share of a rollout's samples: when so few are unfinished they go on in as few instances as take "
        "them, and the devices of the others score; auto: where the plan lets it be, and where that pays; off: samples "
        "end where they begin",
    )
    rebalance: Literal["auto", "off"] = Field(
        default="off",
        description="auto: instances that would end last give unfinished samples to those that would end first, where "
        "that pays; off: they keep them",
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        description="versions between the weights that draw a sample and the update that uses it, at most: so many "
        "batches are generated ahead (docs/staleness.md)",
    )
    partial_rollout: Literal["off", "keep", "recompute"] = Field(
        default="off",
        description="with max_staleness, of samples that are running when new weights come: off (they end first), "
        "keep (they continue, with the KV cache that they have), recompute (they continue, and their KV cache is "
        "computed again with the new weights)",
    )
    tokens_per_version: int = Field(
        default=0,
        ge=0,
        description="with partial_rollout keep or recompute: tokens that a sample draws in a step that does not train "
        "on it, at most, so that nothing depends on the clock; 0: as many as come until it ends (docs/staleness.md)",
    )
    devices: int = Field(
        default=0,
        ge=0,
        le=MOST_RANKS,
        description="processes of a named plan, one per device; 0: every CUDA device, or one on the CPU",
    )
    launcher: Literal["auto", "local", "ray", "attach"] = Field(
        default="auto",
        description="where the processes are: local (this machine), ray (nodes of a Ray cluster), attach (a command on "
        "each node; docs/cluster.md), or auto (attach where torchrun, srun or --nodes has begun it, else local)",
    )
    freeze_after_s: float = Field(
        default=30.0,
        ge=1,
        description="of several devices: a process that sends no heartbeat for so long counts as frozen",
    )
    stalled_after_s: float = Field(
        default=1800.0,
        ge=0,
        description="of several devices: a process that does nothing for so long, and waits for none that does, counts "
        "as stalled; 0: never",
    )
    restarts: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="how often the run goes on by itself, from its last checkpoint and on what is left, after a "
        "process died, froze or stalled or a node was lost (docs/cluster.md)",
    )
    threads: int = Field(default=0, ge=0, le=4096, description="CPU threads; 0: one per core")
    micro_batch_tokens: int = Field(
        default=4096,
        ge=1,
        description="tokens of a forward in scoring and training. On a GPU up to 16384, as they fit, unless it is set",
    )
    checkpoint_activations: bool = Field(
        default=False,
        description="recompute activations and logits in the backward: less memory, more time. On a GPU true if they "
        "do not fit, unless it is set",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="in training with tp, divide what all its ranks keep alike (norms, residuals, inputs of layers) "
        "over them, by tokens: less memory",
    )
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(default=(), description="also log to these")
    _let_be: frozenset[str] = frozenset()

    _paths = path_key("model", "algorithm", "plan", "run_dir")
    _folder = named_folder("run_dir")

    @field_validator("options")
    @classmethod
    def _check_plain(cls, options: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"expected texts, numbers, lists and maps, as a file has them: {error}") from None
        return options

    @field_validator("plan", mode="before")
    @classmethod
    def _is_named_plan(cls, plan: Any) -> Any:
        if not isinstance(plan, str):
            raise ValueError(
                "expected auto, colocated, split, standalone or the path of a plan file, found " + kind_of(plan)
            )
        return plan

    @field_validator("device", mode="before")
    @classmethod
    def _check_device(cls, device: Any) -> Any:
        if isinstance(device, str) and device.startswith("cuda:"):
            raise ValueError(
                f"expected cpu or cuda, found {device!r}; the variable CUDA_VISIBLE_DEVICES says which GPUs there are, "
                "`devices` how many are used"
            )
        return device

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError(f"`steps` ({self.steps}) and `epochs` ({self.epochs:g}) are both set; give one of them")
        return self

    def letting_be(self, sections: Iterable[str] = SECTIONS) -> Recipe:
        """The same, of whose sections these may have keys without effect: a run has begun with them (which a later
        rule must not keep from going on), or they are for other stages too."""
        recipe = self.model_copy()
        recipe._let_be = self._let_be | frozenset(sections)
        return recipe

    def lets_be(self, section: str) -> bool:
        """Whether keys of a section may be without effect."""
        return section in self._let_be

    def models_named(self) -> dict[str, str]:
        """Key → what is set, for each key that names a model."""
        named = {
            "model": self.model,
            **self.reward.keyed_models("reward"),
            **self.cost.keyed_models("cost"),
            "critic.model": self.critic.model,
            "cost_critic.model": self.cost_critic.model,
            "reference.model": self.reference.model,
            "judge.model": self.judge.model,
            "sampling.draft_model": self.sampling.draft_model,
        }
        return {key: value for key, value in named.items() if value is not None}

    @property
    def fusion_rule(self) -> FusionRule:
        """Samples of several turns stay where they are."""
        return FusionRule.of(self.fusion if self.turns.replier is None else "off")

    @property
    def update_rule(self) -> UpdateRule:
        return UpdateRule.of(self.partial_rollout, self.tokens_per_version)

    def steps_of(self, num_rows: int) -> int:
        """Training steps of a run over `num_rows` prompts, examples or pairs: `steps`, or the least that take `epochs`
        passes. A batch may hold the end of one pass and the beginning of the next."""
        if self.epochs is None:
            return self.steps
        return max(1, ceil(Fraction(str(self.epochs)) * num_rows / self.prompts_per_step))


def check_read(section: str, settings: Settings) -> None:
    """Raises ConfigError where a key of a section is set that has no effect without another, which is left off."""
    try:
        settings.check_read()
    except ValueError as error:
        raise ConfigError(f"key `{section}`: {error}") from None
