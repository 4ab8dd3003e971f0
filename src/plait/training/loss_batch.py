"""What a loss sees: one micro-batch, with the denominators of its whole mini-batch.

Shapes: R response tokens of the micro-batch, N its samples, P its pairs, all in row order. A loss returns this
micro-batch's share of the mini-batch loss; shares add up, so neither loss nor gradient depends on the split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from plait.algorithms.losses import Aggregation
from plait.data.host_device import uploaded
from plait.dataflow.unfit import nearest
from plait.errors import RunError
from plait.metric_names import problem_of
from plait.models.outputs import Outputs
from plait.training.sequence_sums import PerSequence, SequenceSum, sums_of
from plait.training.token_means import MiniBatchTotals, TokenMeans

Output = TypeVar("Output")


@dataclass(frozen=True)
class Responses:
    """The responses of a micro-batch, in the order of the rows, as data: what no model computes. On the host."""

    lengths: Sequence[int]
    """Response tokens of each sample; they add up to R."""
    sampling_logprobs_R: Tensor
    """NaN for completions that were given, not sampled."""
    mask_R: Tensor | None = None
    """1.0 where a token is trained, 0.0 where it is not; None: all are."""
    ids: Sequence[tuple[int, int]] | None = None
    """(prompt uid, sample index) of each sample, which `MicroBatchLoss.pairs` needs."""
    whole_groups: bool = True
    """Whether all samples of these prompts that are trained on are here."""


class MicroBatchLoss:
    """The `LossBatch` that `Trainer.train` hands to a loss.

    A language model has `logprobs`, `entropies`, `likeliest` and `logprobs_at`, a scalar model `values` and `scores`;
    reading what the role's model does not have raises a RunError.

    Args:
        outputs: of the model, for these responses.
        totals, means: of the mini-batch, shared by its micro-batches.
        role: for messages.
    """

    def __init__(
        self, outputs: Outputs, responses: Responses, totals: MiniBatchTotals, means: TokenMeans, *, role: str = "actor"
    ) -> None:
        like_R, mask_R = outputs.per_token, responses.mask_R
        self._outputs = outputs
        device, sampling_R = like_R.device, responses.sampling_logprobs_R
        self.sampling_logprobs = uploaded(sampling_R, sampling_R.dtype, device)
        self.mask = (
            torch.ones_like(like_R, requires_grad=False) if mask_R is None else uploaded(mask_R, mask_R.dtype, device)
        )
        self._kept_R = None if mask_R is None else self.mask > 0
        lengths_N = torch.as_tensor(responses.lengths, dtype=torch.int64)
        trained_N = lengths_N if mask_R is None else sums_of(mask_R, lengths_N).to(torch.int64)
        self._has_trained = (trained_N > 0).tolist()
        self._lengths_N, trained_N = uploaded(torch.stack([lengths_N, trained_N]), torch.int64, device).unbind()
        self._counted_N = trained_N > 0
        self._trained_R = trained_N.clamp(min=1).repeat_interleave(self._lengths_N, output_size=len(like_R))
        """For each token the trained tokens of its response."""
        self._totals = totals
        self._means = means
        self._ids, self._whole_groups = responses.ids, responses.whole_groups
        self._role = role

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError that says what there is: columns, which other trainers put into their batches, are a
        loss's arguments. What a property that there is could not read is its own error."""
        if name in vars(type(self)):
            return object.__getattribute__(self, name)
        has = ["mask", "sampling_logprobs", *(own for own in vars(type(self)) if not own.startswith("_"))]
        raise AttributeError(
            f"a batch has no `{name}`{nearest(name, has)}, but {', '.join(has)}; columns are arguments of the loss"
        )

    @property
    def logprobs(self) -> Tensor:
        """[R], differentiable: under the trained weights, at the sampling temperature, over what each token was drawn
        from (`Sample.supports`)."""
        return self._present(self._outputs.logprobs_R, "logprobs")

    @property
    def entropies(self) -> Tensor:
        """[R], differentiable: of the same distributions, nats."""
        return self._present(self._outputs.entropies_R, "entropies")

    @property
    def likeliest(self) -> Tensor:
        """[R], constant, of the dtype of the log-probs: 1.0 where no token is likelier than the one that stands there,
        else 0.0."""
        return self._present(self._outputs.likeliest_R, "likeliest").to(self.mask.dtype)

    def logprobs_at(self, ids_RK: Tensor) -> Tensor:
        """[R, K + 1], differentiable: log-probs of these tokens under the trained weights, at the sampling temperature
        and over the whole vocabulary, and last that of all other tokens together, -43 where that is nothing. Passes the
        head once more. The ids may be of any dtype.

        Raises:
            RunError: `ids_RK` is not [R, K].
        """
        at = self._present(self._outputs.logprobs_at, "logprobs_at")
        shape = torch.Size((len(self.mask), *getattr(ids_RK, "shape", ())[-1:]))
        _check(ids_RK, shape, "batch.logprobs_at: expected ids [R, K]")
        return at(ids_RK.to(torch.int64))

    @property
    def values(self) -> Tensor:
        """[R], differentiable: the scalar model's value of the state before each response token."""
        return self._present(self._outputs.values_R, "values")

    @property
    def scores(self) -> Tensor:
        """[N], differentiable: the scalar model's head at the last token of each sample."""
        return self._present(self._outputs.scores_N, "scores")

    def aggregate(self, values_R: Tensor, how: Aggregation | str) -> Tensor:
        """This micro-batch's share of the aggregate over the mini-batch (see `Aggregation`), masked. A scalar.

        Raises:
            RunError: `values_R` is not [R], or `how` names no aggregation.
        """
        self._check_R(values_R, "aggregate")
        if how not in list(Aggregation):
            raise RunError(f"batch.aggregate: expected one of {', '.join(Aggregation)}, found `{how}`")
        totals, values_R = self._totals, self._masked(values_R)
        match Aggregation(how):
            case Aggregation.TOKEN_MEAN:
                return values_R.sum() / max(1, totals.tokens)
            case Aggregation.SEQUENCE_MEAN:
                return (values_R / self._trained_R).sum() / max(1, totals.sequences)
            case Aggregation.CONSTANT:
                return values_R.sum() / (max(1, totals.sequences) * totals.max_response_tokens)

    def sequence_sum(self, values_R: Tensor) -> Tensor:
        """[R]: for each token the sum of `values_R` over the trained tokens of its response. Differentiable; exact, as
        no response is split.

        Raises:
            RunError: `values_R` is not [R].
        """
        self._check_R(values_R, "sequence_sum")
        return SequenceSum.apply(self._masked(values_R), self._lengths_N)

    def per_sequence(self, values_R: Tensor) -> Tensor:
        """[N]: the sum of `values_R` over the trained tokens of each sample, in row order. Differentiable.

        Raises:
            RunError: `values_R` is not [R].
        """
        self._check_R(values_R, "per_sequence")
        return PerSequence.apply(self._masked(values_R), self._lengths_N)

    def pairs(self, values_N: Tensor) -> tuple[Tensor, Tensor]:
        """(first [P], second [P]): the values of the two samples of each prompt, in the order in which they were drawn
        or given: the chosen one first. A pair of which one sample has no trained token is left out.

        Raises:
            RunError: `values_N` is not [N], or a prompt has not exactly two samples here; of a call without
                `whole_groups` also where these are not its first two.
        """
        self._check_N(values_N, "pairs")
        first_P, second_P = self._pair_places
        return values_N[first_P], values_N[second_P]

    def mean_over_sequences(self, values_N: Tensor) -> Tensor:
        """This micro-batch's share of the mean over the samples that have a trained token. A scalar.

        Raises:
            RunError: `values_N` is not [N].
        """
        self._check_N(values_N, "mean_over_sequences")
        return values_N.where(self._counted_N, 0).sum() / max(1, self._totals.sequences)

    def mean_over_pairs(self, values_P: Tensor) -> Tensor:
        """This micro-batch's share of the mean over pairs. A scalar.

        Raises:
            RunError: `values_P` is not [P], see `pairs`.
        """
        self._check_P(values_P, "mean_over_pairs")
        return values_P.sum() / max(1, self._totals.pairs)

    def log(self, name: str, values: Tensor, per: str = "token") -> None:
        """Record the mean of `values` over the mini-batch as metric `name`.

        Args:
            values: [R], [N] or [P] by `per`.
            per: "token" (trained ones), "sequence" (those with a trained token) or "pair".

        Raises:
            RunError: `values` has another shape, `per` is something else, or `name` is none of a metric.
        """
        if (problem := problem_of(name)) is not None:
            raise RunError(f"batch.log: {problem}")
        call = f"log({name!r})"
        match per:
            case "token":
                self._check_R(values, call)
                self._means.add(name, self._masked(values))
            case "sequence":
                self._check_N(values, call)
                self._means.add(name, values.where(self._counted_N, 0), self._totals.sequences)
            case "pair":
                self._check_P(values, call)
                self._means.add(name, values, self._totals.pairs)
            case _:
                raise RunError(f"batch.{call}: expected per= token, sequence or pair, found {per!r}")

    @cached_property
    def _pair_places(self) -> tuple[Tensor, Tensor]:
        """Places [P] of the first and of the second samples."""
        assert self._ids is not None, "pairs need the ids of the samples"
        prompts: dict[int, dict[int, int]] = {}
        for place, (uid, index) in enumerate(self._ids):
            prompts.setdefault(uid, {})[index] = place
        for uid, places in prompts.items():
            # Where groups may be split, two samples that happen to be here may be a part of more.
            if len(places) != 2 or not (self._whole_groups or set(places) == {0, 1}):
                raise RunError(
                    f"batch.pairs: expected two samples of every prompt, found {sorted(places)} of prompt {uid}; give "
                    f"{self._role}.train whole_groups=True, and a `keep` that leaves out all other samples"
                )
        counted = self._has_trained
        places_P = ([place for _, place in sorted(places.items())] for places in prompts.values())
        pairs = [pair for pair in places_P if all(counted[place] for place in pair)]
        first_P, second_P = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
        device = self.mask.device
        return uploaded(first_P, torch.int64, device), uploaded(second_P, torch.int64, device)

    def _masked(self, values_R: Tensor) -> Tensor:
        """0 where the mask is 0, whatever stands there: a product would keep NaN."""
        return values_R if self._kept_R is None else values_R.where(self._kept_R, 0)

    def _present(self, output: Output | None, name: str) -> Output:
        if output is None:
            kind, has = (
                ("a scalar model", "`values` and `scores`")
                if self._outputs.logprobs_R is None
                else ("a language model", "`logprobs`, `entropies`, `likeliest` and `logprobs_at`")
            )
            raise RunError(f"batch.{name}: role `{self._role}` is {kind}, whose batches have {has}")
        return output

    def _check_R(self, values: Any, call: str) -> None:
        _check(values, self.mask.shape, f"batch.{call}: expected one value per response token")

    def _check_N(self, values: Any, call: str) -> None:
        _check(values, self._lengths_N.shape, f"batch.{call}: expected one value per sample")

    def _check_P(self, values: Any, call: str) -> None:
        _check(values, self._pair_places[0].shape, f"batch.{call}: expected one value per pair")


def _check(values: Any, shape: torch.Size, expected: str) -> None:
    if not isinstance(values, Tensor) or values.shape != shape:
        shape_found = tuple(values.shape) if isinstance(values, Tensor) else f"{values!r:.80}"
        raise RunError(f"{expected}, {tuple(shape)}, found {shape_found}")
