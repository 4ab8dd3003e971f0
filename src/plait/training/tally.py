"""What the micro-batches of one mini-batch add up to, over all ranks that had a part of them.

Every rank gets the same bits, so that all decide alike: sums are those of the dp ranks in their order. Of the ranks
that compute the same micro-batch (tensor parallelism, pipelines) one speaks: the first of the last stage.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.data.host_device import read
from plait.data.rows import FloatArray
from plait.models.outputs import Outputs
from plait.models.parallel.peers import Peers
from plait.models.parallel.team import Team
from plait.policy.packing import MicroBatch
from plait.training.mini_batch import MiniBatch
from plait.training.token_means import TokenMeans

PIECE_NUMBERS = 1 << 20
"""So many of the numbers of rows are on a device at a time, where ranks add them up: a row may have many."""


@dataclass(frozen=True)
class Totals:
    """What a whole mini-batch adds up to, the same on every rank."""

    loss: float
    tokens: int
    """Packed tokens that were computed; a pipeline's once, a prompt as often as it was."""
    num_nonfinite: int
    means: dict[str, float]
    seen: FloatArray | None
    """[3, R] log-probs, sampling log-probs (NaN where there are none) and entropies of every response token of the
    rows, where they were asked for."""

    @property
    def loss_is_finite(self) -> bool:
        return math.isfinite(self.loss)


class Tally:
    """Gathers the numbers of a mini-batch on one rank. They stay on the device until `over` reads them, all at once:
    the host goes on to the next micro-batch while the device computes this one.

    Args:
        sees: keep log-probs, the sampling engine's too, and entropies, of a language model.
        routes: ranks say which experts were chosen (`add_chosen`, `add_replayed`).
    """

    def __init__(self, batch: MiniBatch, *, sees: bool = False, routes: bool = False) -> None:
        self.batch = batch
        self._sees, self._routes = sees, routes
        self._tokens = 0
        self._shares: list[Tensor] = []
        """The share of the loss of each micro-batch, a scalar."""
        self._num_nonfinite: list[Tensor] = []
        self._seen: list[tuple[MicroBatch, Tensor]] = []
        """[2, tokens] log-probs and entropies, where they are to be seen."""
        self._chosen: list[Tensor] = []
        """[L, E] of each micro-batch, see `add_chosen`."""
        self._replayed: list[Tensor] = []
        """[2] of each micro-batch, see `add_replayed`."""

    def add(self, micro: MicroBatch, outputs: Outputs, share: Tensor) -> None:
        """One micro-batch: what the model said, and its share of the loss, a scalar."""
        self._shares.append(share.detach().clone())  # what a loss returns may be a view of what it writes over later
        self._tokens += micro.num_tokens
        self._num_nonfinite.append(outputs.num_nonfinite)
        if self._sees and outputs.logprobs_R is not None and outputs.entropies_R is not None:
            self._seen.append((micro, torch.stack([outputs.logprobs_R.detach(), outputs.entropies_R.detach()])))

    def add_chosen(self, chosen_LE: Tensor) -> None:
        """[L, E]: how often each of E experts was chosen in each of the L mixtures of this stage, in a micro-batch."""
        self._chosen.append(chosen_LE)

    def add_replayed(self, counts_2: Tensor) -> None:
        """[2]: choices that routers of this stage would have made otherwise, and all that they were told, in a
        micro-batch."""
        self._replayed.append(counts_2)

    def over(self, team: Team, device: torch.device) -> Totals:
        """Over all ranks; every one of them calls it."""
        means = self.batch.means
        seen = [computed for _, computed in self._seen]
        kinds = (self._shares, self._num_nonfinite, means.totals, seen, self._chosen, self._replayed)
        numbers = iter(read([tensor for kind in kinds for tensor in kind]))
        shares, nonfinite, totals, computed, chosen, replayed = ([next(numbers) for _ in kind] for kind in kinds)
        record = {
            "loss": _in_order(map(float, shares)),
            "tokens": self._tokens,
            "nonfinite": sum(map(int, nonfinite)),
            "means": means.sums(map(float, totals)),
        }
        records = [record for record in gathered(team.all, record if speaks(team) else {}, device) if record]
        of_routers = self._router_use(team, chosen, replayed, device)
        return Totals(
            loss=_in_order(record["loss"] for record in records),
            tokens=sum(record["tokens"] for record in records),
            num_nonfinite=sum(record["nonfinite"] for record in records),
            means=TokenMeans.of(record["means"] for record in records) | of_routers,
            seen=summed(team, self._placed(computed), device) if self._sees else None,
        )

    def _router_use(
        self, team: Team, chosen: Sequence[FloatArray], replayed: Sequence[FloatArray], device: torch.device
    ) -> dict[str, float]:
        """The metrics of how unevenly experts were used, and how often routers would have chosen others than they were
        told, over the layers of all stages; `chosen` and `replayed` are of this rank's micro-batches."""
        if not self._routes:
            return {}
        speaks_here = team.tp.index == 0
        own = {
            "stage": team.pp.index,
            "chosen": np.sum(chosen, axis=0).tolist() if chosen and speaks_here else [],
            "replayed": np.sum(replayed, axis=0).tolist() if replayed and speaks_here else [0, 0],
        }
        of_stages: dict[int, list[list[list[float]]]] = {}
        records = gathered(team.all, own, device)
        for record in records:
            if record["chosen"]:
                of_stages.setdefault(record["stage"], []).append(record["chosen"])
        metrics = {}
        if of_stages:
            layers = [layer for _, stage in sorted(of_stages.items()) for layer in np.sum(stage, axis=0).tolist()]
            metrics[f"{self.batch.role}/expert_max_violation"] = expert_max_violation(layers)
        differing, told = np.sum([record["replayed"] for record in records], axis=0).tolist()
        if told:
            metrics[f"{self.batch.role}/routed_otherwise"] = differing / told
        return metrics

    def _placed(self, computed: Sequence[FloatArray]) -> FloatArray:
        """See `Totals.seen`: 0 where another rank has computed."""
        seen = np.zeros((3, self.batch.rows.num_tokens))
        for (micro, _), numbers in zip(self._seen, computed, strict=True):
            places = self.batch.rows.token_places(micro.samples)
            seen[::2, places] = numbers
            seen[1, places] = self.batch.rows.sampling_logprobs[places]
        return seen


def expert_max_violation(chosen: Iterable[Sequence[float]]) -> float:
    """How far the most used expert of a layer is above the mean, over the mean; of several layers the mean. 0: all are
    used alike (MaxVio: Wang et al. 2024, arXiv 2408.15664).

    Args:
        chosen: of each layer, how often each expert was chosen.
    """
    return fmean(max(layer) / fmean(layer) - 1 for layer in chosen)


def _in_order(numbers: Iterable[float]) -> float:
    """Their sum, each addition rounded: from Python 3.12 on `sum` makes good what that loses, which is other bits."""
    total = 0.0
    for number in numbers:
        total += number
    return total


def speaks(team: Team) -> bool:
    """Whether this rank says what was computed of its micro-batches."""
    return team.is_last_stage and team.tp.index == 0


def gathered(peers: Peers, record: Mapping[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """The JSON record of every rank, by index."""
    if peers.size == 1:
        return [dict(record)]
    text = torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8).to(device)
    sizes = peers.all_gather(torch.tensor([len(text)], device=device))
    texts = peers.all_gather(text, [int(size) for size in sizes])
    return [json.loads(of_rank.cpu().numpy().tobytes()) for of_rank in texts]


def summed(team: Team, values: FloatArray, device: torch.device) -> FloatArray:
    """The sums over all ranks, on every rank, of numbers of which each rank that speaks has some and 0 for the others'.

    Args:
        values: float64 of one shape on all ranks, contiguous; those of a rank that does not speak count as 0. May be
            overwritten.
        device: on which ranks send them.

    Returns:
        float64 of that shape, on the host.
    """
    if team.all.size == 1:
        return values
    total = values if speaks(team) else np.zeros_like(values)
    rows = max(1, PIECE_NUMBERS * len(total) // max(1, total.size))
    for start in range(0, len(total), rows):
        piece = torch.as_tensor(total[start : start + rows])
        piece.copy_(team.all.all_reduce(piece.to(device)))
    return total
