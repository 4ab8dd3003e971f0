"""AdamW over flat buffers: masters, moments and gradients are the model's trained parameters under their own layout.

Buffers are flat, in the master dtype (float32; float64 where the model computes in float64), and laid out by the
model's `trained_layout`, so a checkpoint or a later move reads them as they lie. What AdamW sees are views of them.
Of a model with adapters those are the adapters alone: its frozen base has no buffer here.

Of several ranks each has the gradients of its part of the model, but masters and moments of its `Share` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from plait.data.host_device import read
from plait.errors import RunError
from plait.layout.holdings import Holdings, zero_shards
from plait.layout.params import Block
from plait.layout.zero_shares import Share
from plait.models.backbone_model import BackboneModel
from plait.models.flat_weights import FlatWeights
from plait.models.parallel.team import Team
from plait.models.weight_share import WeightShare
from plait.training.gradients import CACHE_CHUNK, Gradients, ShardedGradients, WholeGradients
from plait.training.results import StepReport
from plait.training.settings import OptimizerSettings

AVERAGED = "averaged"
"""The name in `MasterOptimizer.buffers` of what the reference is made from."""

COPY_CHUNK = 1 << 22
"""Elements that are cast at a time where a temporary copy might be made."""


class MasterOptimizer:
    """The optimizer of one trained role on one device.

    A parameter requires a gradient only while its role trains: roles may share a module, and of its parameters each
    trains its own.

    Weight decay applies to parameters of two or more dims (matrices, embeddings), not to norms and biases, those of
    stacked experts among them. A parameter that got no gradient, as an expert without a token, counts as having a
    gradient of 0; what no text can reach is no trained parameter (`models.reach.unreached`).

    Args:
        model: of several ranks, this one's part.
        team: the ranks; all of them call `step` together.
        is_followed: keep a slow average of the masters beside them, for `average`.
    """

    def __init__(
        self,
        model: BackboneModel,
        settings: OptimizerSettings,
        total_steps: int,
        team: Team | None = None,
        *,
        is_followed: bool = False,
    ) -> None:
        self.settings = settings
        self.total_steps = total_steps
        self._model = model
        self._team = Team.alone() if team is None else team
        self._share = Share.of(
            model.trained.layout, model.trained.counted_ranges(), self._team.layout.parallelism, self._team.coordinates
        )
        weights, start, stop = model.trained.flat, self._share.start, self._share.stop
        dtype = torch.promote_types(weights.dtype, torch.float32)
        self._has_masters = weights.dtype != dtype
        """Whether the masters are a copy: where the dtypes agree the working weights are the masters, one buffer."""
        if self._has_masters:
            masters = torch.empty(stop - start, dtype=dtype, device=weights.device)
            self.masters = weights.read(start, stop, masters)
        else:
            self.masters = _in_place(weights, start, stop).detach()
        # Adapters may have weights under them that another role's key shares: ranks then compute in step for this, too.
        shards = self._team.layout.shards_weights or (settings.shards_gradients and self._team.dp.size > 1)
        kind = ShardedGradients if shards else WholeGradients
        self.collected: Gradients = kind(model.trained, self._team, self._share, dtype)
        self.exp_avg = torch.zeros_like(self.masters)
        self.exp_avg_sq = torch.zeros_like(self.masters)
        self.averaged = self.masters.clone() if is_followed else None
        """What the reference is made from; None: nothing is."""
        self.attempted_steps = 0
        """Optimizer steps so far, skipped ones included: the learning-rate schedule counts these."""
        self.applied_steps = 0
        self.skipped_in_row = 0
        self._adamw = self._build()

    def _build(self) -> torch.optim.AdamW | None:
        """None where the share of this rank is empty."""
        start, gradients = self._share.start, self.collected.own
        decayed, plain, state = [], [], {}
        for piece in self._share.pieces:
            at = slice(piece.start - start, piece.stop - start)
            master, exp_avg, exp_avg_sq = (buffer[at] for buffer in (self.masters, self.exp_avg, self.exp_avg_sq))
            master.grad = gradients[at]
            (decayed if piece.is_matrix else plain).append(master)
            steps = torch.zeros((), dtype=torch.float32, device=master.device)
            state[master] = {"step": steps, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        if not state:
            return None
        groups = [
            {"params": decayed, "weight_decay": self.settings.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.settings.learning_rate,
            betas=self.settings.betas,
            eps=self.settings.epsilon,
            fused=True,
        )
        adamw.state.update(state)
        return adamw

    def begin_with(self, values: Callable[[Block], Tensor | None]) -> None:
        """Before the first step: set the masters to the numbers of the checkpoint, and not to the working weights,
        which are these numbers rounded. From rounded masters, updates of less than half a rounding step would show in
        the working weights only after many of them.

        Args:
            values: gives each block [*block.shape] of the trained parameters, in any dtype; None if the working weights
                are exact.
        """
        share = self._share
        for block, start, stop in self._model.trained.layout.entries if self._has_masters else ():
            low, high = max(start, share.start), min(stop, share.stop)
            if low < high and (exact := values(block)) is not None:
                self.masters[low - share.start : high - share.start].copy_(
                    exact.reshape(-1)[low - start : high - start]
                )
        if self.averaged is not None:
            self.averaged.copy_(self.masters)

    @contextmanager
    def collecting_gradients(self) -> Iterator[None]:
        """Within it the trained parameters require gradients, and a backward pass gives each one's to `collected` as
        soon as it is complete, and lets it go: gradients in the compute dtype never exist all at once, and sums are in
        the master dtype. Forward and backward both belong in it."""
        handles, required = [], []
        for entry, (block, _, _) in enumerate(self._model.trained.layout.entries):

            def take(param: Tensor, entry: int = entry) -> None:
                if param.grad is not None:  # None: part of the graph, but no gradient reached it
                    gradient, param.grad = param.grad, None
                    self.collected.take(entry, gradient)

            param = self._model.trained.parameter(block.param.name)
            required.append((param, param.requires_grad))
            param.requires_grad_(True)
            handles.append(param.register_post_accumulate_grad_hook(take))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for param, before in required:
                param.requires_grad_(before)

    @property
    def gradients(self) -> Tensor:
        """[E], those of all working weights of this rank, or of its share: see `gradients.Gradients`."""
        return self.collected.flat

    def step(self, loss_is_finite: bool) -> StepReport:
        """Clip by the global norm, update the masters, cast them into the working weights.

        A step whose loss or gradient is not finite changes nothing but the counts. On several ranks gradients are
        summed first, and every rank gets all new weights of its part of the model; all of them report the same.

        Args:
            loss_is_finite: the same on every rank.

        Raises:
            RunError: too many such steps in a row; a peer is gone.
        """
        learning_rate = self.settings.learning_rate_at(self.attempted_steps, self.total_steps)
        self.attempted_steps += 1
        self.collected.reduce()
        grad_norm = self._norm()
        if not (loss_is_finite and grad_norm < float("inf")):
            self.skipped_in_row += 1
            if self.skipped_in_row >= self.settings.max_skipped_steps:
                raise RunError(
                    f"{self.skipped_in_row} optimizer steps in a row had a loss or gradient that is not finite (last: "
                    f"loss {'finite' if loss_is_finite else 'not finite'}, gradient norm {grad_norm}); lower "
                    "optimizer.learning_rate, check the rewards, or raise optimizer.max_skipped_steps"
                )
            return StepReport(learning_rate, grad_norm, skipped=True, loss_is_finite=loss_is_finite)
        self.skipped_in_row = 0
        if grad_norm > self.settings.max_grad_norm:
            self.collected.own.mul_(self.settings.max_grad_norm / grad_norm)
        if self._adamw is not None:
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
        self.applied_steps += 1
        self._publish()
        return StepReport(learning_rate, grad_norm, skipped=False)

    def _norm(self) -> float:
        """Euclidean norm of the gradient of the whole model, the same bits on every rank. Of reduced gradients."""
        own, start = self.collected.own, self._share.start
        squares = [sum_of_squares(own[low - start : high - start]) for low, high in self._share.counted]
        square = sum(squares, start=torch.zeros((), dtype=torch.float64, device=self.gradients.device))
        if self._team.all.size > 1:
            square = torch.stack(self._team.all.all_gather(square.reshape(()))).sum()
        return float(read([square.sqrt()])[0])

    def _publish(self) -> None:
        """Cast the masters into the working weights, piece by piece: no second copy of the weights ever exists. Where
        this rank holds its share of these alone, that is all."""
        weights, team, share = self._model.trained.flat, self._team, self._share
        if self._has_masters:
            weights.write(share.start, share.stop, self.masters)
        elif weights.whole is not None:
            increment_version(weights.whole)  # AdamW's fused kernel does not, and engines go by it
        weights.all_gather(team.dp, share.bounds)
        for low, high in share.tied:
            weights.broadcast(team.ends, low, high, 0)

    def average(self, share: float) -> None:
        """averaged = share * masters + (1 - share) * averaged, of this rank's share."""
        assert self.averaged is not None, "no average is kept of what nobody follows"
        self.averaged.lerp_(self.masters, share)

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, of this rank's share: `buffers`, and counts, each an int64 scalar.
        The flat tensors are the live ones, not copies: write them out before the next step."""
        counts = {
            "attempted_steps": self.attempted_steps,
            "applied_steps": self.applied_steps,
            "skipped_in_row": self.skipped_in_row,
        }
        return self.buffers() | {name: torch.tensor(count, dtype=torch.int64) for name, count in counts.items()}

    def buffers(self) -> dict[str, Tensor]:
        """The flat tensors of `state` [elements of this rank's share], in the dtype of the masters. They are the live
        ones: written in place by a move, and taken over by `load_state`."""
        buffers = {"masters": self.masters, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return buffers if self.averaged is None else {**buffers, AVERAGED: self.averaged}

    def scratch(self) -> dict[str, Tensor]:
        """Flat tensors, `Gradients.flat` and `Gradients.rooms`, whose values no call leaves to the next."""
        rooms = {f"gradients on their way ({number})": room for number, room in enumerate(self.collected.rooms)}
        return {"gradients": self.gradients, **rooms}

    def holdings(self) -> dict[str, Holdings]:
        """For each of `buffers` what it holds on every rank of the team, its own name as the name of the buffer: for
        moves, and for files that any layout can read."""
        whole = self._model.trained.parameters
        dtype = str(self.masters.dtype).removeprefix("torch.")
        return {name: zero_shards(whole, self._team.layout, dtype, name) for name in self.buffers()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned, in a model of the same layout; the working weights follow.

        The flat tensors may be those of `buffers` themselves, filled in place. All ranks of the team call it together.

        Raises:
            RunError: the state lacks a tensor or holds one of another shape or dtype.
        """
        for name, expected in self.state().items():
            stored = state.get(name)
            if stored is None or stored.shape != expected.shape or stored.dtype != expected.dtype:
                what = "nothing" if stored is None else f"{stored.dtype} {tuple(stored.shape)}"
                raise RunError(
                    f"optimizer state `{name}`: expected {expected.dtype} {tuple(expected.shape)}, found {what}; the "
                    "checkpoint belongs to another model or another dtype"
                )
        for name, buffer in self.buffers().items():
            if state[name] is not buffer:
                buffer.copy_(state[name])
        self.attempted_steps = int(state["attempted_steps"])
        self.applied_steps = int(state["applied_steps"])
        self.skipped_in_row = int(state["skipped_in_row"])
        for entry in {} if self._adamw is None else self._adamw.state.values():
            entry["step"].fill_(float(self.applied_steps))
        self._publish()


def _in_place(weights: FlatWeights | WeightShare, start: int, stop: int) -> Tensor:
    """Elements [start, stop), which this rank updates, as they lie: [stop - start]."""
    if isinstance(weights, WeightShare):
        return weights.view(start, stop)
    assert weights.whole is not None, "weights that are masters lie in one buffer"
    return weights.whole[start:stop]


def sum_of_squares(flat: Tensor) -> Tensor:
    """Squares of a flat buffer [E], summed in float64 over chunks in a fixed order. A scalar."""
    chunk = CACHE_CHUNK if flat.device.type == "cpu" else COPY_CHUNK
    squares = [torch.linalg.vector_norm(piece, dtype=torch.float64) ** 2 for piece in flat.split(chunk)]
    return torch.stack(squares).sum()
