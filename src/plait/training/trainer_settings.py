"""What a trainer is told: how it computes, what it computes with, how it updates. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from plait.data.rows import Rows, sizes_of
from plait.policy.packing import MicroBatch
from plait.schedule.generators import one_f_one_b
from plait.schedule.pipeline import Workload, micro_batches_of
from plait.schedule.schedule import Schedule
from plait.training.micro_batches import split_over
from plait.training.settings import OptimizerSettings

Rule = Callable[[Workload], Schedule]
"""Makes the pipeline schedule of a mini-batch."""


@dataclass(frozen=True)
class ExecutionSettings:
    """How work is split and run: it changes time and memory, never what is computed."""

    micro_batch_tokens: int
    """Most packed tokens of one forward, prompts included; one longer sample runs alone."""
    micro_batches: int | None = None
    """Micro-batches of each mini-batch and dp rank, as far as there are samples; more if they would exceed
    `micro_batch_tokens`. None: as many as suit the stages (`micro_batches_of`)."""
    checkpoint_activations: bool = False
    """Recompute layer activations in the backward pass."""
    pair_tokens: float = 0.0
    """What a pair of a query and a key takes, in tokens, where samples are divided over dp ranks (`plan.SHARES`)."""
    pipeline: Rule = one_f_one_b
    """Makes the schedule of each mini-batch where the model is split into stages; any valid one gives the same result
    (`schedule.generators` has some)."""

    def split(
        self, rows: Rows, *, num_shares: int, num_stages: int, whole_groups: bool = False
    ) -> tuple[tuple[MicroBatch, ...], ...]:
        """The micro-batches of each dp rank.

        Args:
            num_shares: dp ranks.
            num_stages: pipeline stages of each.
            whole_groups: never split the samples of one prompt.
        """
        return split_over(
            sizes_of(rows),
            self.micro_batch_tokens,
            ways=num_shares,
            least=micro_batches_of(num_stages) if self.micro_batches is None else self.micro_batches,
            whole_groups=whole_groups,
            pair_tokens=self.pair_tokens,
        )


@dataclass(frozen=True)
class SampleSettings:
    """How the responses came about that a role scores and trains on."""

    temperature: float
    """That they were sampled at; log-probs are taken at it unless a call says another."""
    max_response_tokens: int = 0
    """The response limit, denominator of the constant aggregation. 0: the role only scores."""
    stop_token_ids: Collection[int] | None = None
    """That end a response, for `eos_coverage`; None: the model's."""
    replays_experts: bool = False
    """Their tokens go to the experts that they went to when the role drew them (`Sample.experts`)."""

    def __post_init__(self) -> None:
        assert self.temperature > 0, f"log-probs need a temperature above 0, got {self.temperature}"


@dataclass(frozen=True)
class UpdateSettings:
    """How a trained role is updated."""

    optimizer: OptimizerSettings
    total_optimizer_steps: int
    """Those of the whole run; where the learning-rate schedule ends."""
    seed: int = 0
    """The run's; fixes the mini-batches together with step and epoch."""
    is_followed: bool = False
    """The optimizer keeps a slow average of the masters, which the reference is made from."""

    def __post_init__(self) -> None:
        assert self.total_optimizer_steps > 0, "a trained role needs total_optimizer_steps"
