"""AdamW over flat buffers: masters, moments and gradients are the model's trained parameters under their own layout.

Buffers are flat, in the master dtype (float32; float64 where the model computes in float64), and laid out by the
model's `trained_layout`, so a checkpoint or a later move reads them as they lie. What AdamW sees are views of them.
Of a model with adapters those are the adapters alone: its frozen base has no buffer here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.errors import RunError
from plait.models.language_model import LanguageModel
from plait.models.scalar_model import ScalarModel
from plait.training.settings import OptimizerSettings

COPY_CHUNK = 1 << 22
"""Elements that are cast at a time where a temporary copy might be made."""

CACHE_CHUNK = 1 << 15
"""Elements whose widened copy stays in a CPU's cache."""


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did."""

    learning_rate: float
    grad_norm: float
    """Global norm before clipping; not finite where the step was skipped for it."""
    skipped: bool
    loss_is_finite: bool = True


class MasterOptimizer:
    """The optimizer of one trained role on one device.

    A parameter requires a gradient only while its role trains: roles may share a module, and of its parameters each
    trains its own.

    Weight decay applies to parameters of two or more dims (matrices, embeddings), not to norms and biases. A parameter
    that got no gradient counts as having a gradient of 0.
    """

    def __init__(self, model: LanguageModel | ScalarModel, settings: OptimizerSettings, total_steps: int) -> None:
        self.settings = settings
        self.total_steps = total_steps
        self._model = model
        weights = model.trained_weights
        dtype = torch.promote_types(weights.dtype, torch.float32)
        # Where the dtypes agree the working weights are the masters: a view instead of a copy.
        self.masters = weights.detach() if weights.dtype == dtype else weights.to(dtype)
        self.gradients = torch.zeros_like(self.masters)
        self.exp_avg = torch.zeros_like(self.masters)
        self.exp_avg_sq = torch.zeros_like(self.masters)
        self.attempted_steps = 0
        """Optimizer steps so far, skipped ones included: the learning-rate schedule counts these."""
        self.skipped_in_row = 0
        self._adamw = self._build()

    def _build(self) -> torch.optim.AdamW:
        decayed, plain, state = [], [], {}
        for block, start, stop in self._model.trained_layout.entries:
            master, gradient, exp_avg, exp_avg_sq = (
                buffer[start:stop].view(block.shape)
                for buffer in (self.masters, self.gradients, self.exp_avg, self.exp_avg_sq)
            )
            master.grad = gradient
            (decayed if len(block.shape) >= 2 else plain).append(master)
            steps = torch.zeros((), dtype=torch.float32, device=master.device)
            state[master] = {"step": steps, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
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

    @contextmanager
    def collecting_gradients(self) -> Iterator[None]:
        """Within it the trained parameters require gradients, and a backward pass adds each one's gradient to the flat
        buffer as soon as it is complete, and frees it: gradients in the compute dtype never exist all at once, and sums
        are in the master dtype. Forward and backward both belong in it."""
        handles, required = [], []
        for block, start, stop in self._model.trained_layout.entries:
            flat = self.gradients[start:stop].view(block.shape)

            def accumulate(param: Tensor, flat: Tensor = flat) -> None:
                if param.grad is not None:  # None: part of the graph, but no gradient reached it
                    _add_widened(flat, param.grad)
                    param.grad = None

            param = self._model.trained_parameter(block.param.name)
            required.append((param, param.requires_grad))
            param.requires_grad_(True)
            handles.append(param.register_post_accumulate_grad_hook(accumulate))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for param, before in required:
                param.requires_grad_(before)

    def zero_gradients(self) -> None:
        self.gradients.zero_()

    def step(self, loss_is_finite: bool) -> StepReport:
        """Clip by the global norm, update the masters, cast them into the working weights.

        A step whose loss or gradient is not finite changes nothing but the counts.

        Raises:
            RunError: too many such steps in a row.
        """
        learning_rate = self.settings.learning_rate_at(self.attempted_steps, self.total_steps)
        self.attempted_steps += 1
        grad_norm = _norm(self.gradients)
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
            self.gradients.mul_(self.settings.max_grad_norm / grad_norm)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._publish()
        return StepReport(learning_rate, grad_norm, skipped=False)

    def _publish(self) -> None:
        """Cast the masters into the working weights, chunk by chunk: no second copy of the weights ever exists."""
        weights = self._model.trained_weights
        if weights.data_ptr() == self.masters.data_ptr():
            return
        for target, source in zip(weights.split(COPY_CHUNK), self.masters.split(COPY_CHUNK), strict=True):
            target.copy_(source)

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on. The flat tensors are the live buffers, not copies: write them out
        before the next step."""
        steps = [int(entry["step"]) for entry in self._adamw.state.values()]
        assert len(set(steps)) <= 1, "parameters have seen different numbers of steps"
        counts = {
            "attempted_steps": self.attempted_steps,
            "applied_steps": steps[0] if steps else 0,
            "skipped_in_row": self.skipped_in_row,
        }
        flat = {"masters": self.masters, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return flat | {name: torch.tensor(count, dtype=torch.int64) for name, count in counts.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from what `state` returned, in a model of the same layout; the working weights follow.

        Raises:
            RunError: the state lacks a tensor or holds one of another shape or dtype.
        """
        for name, expected in self.state().items():
            found = state.get(name)
            if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
                what = "nothing" if found is None else f"{found.dtype} {tuple(found.shape)}"
                raise RunError(
                    f"optimizer state `{name}`: expected {expected.dtype} {tuple(expected.shape)}, found {what}; the "
                    "checkpoint belongs to another model or another dtype"
                )
        for buffer, name in ((self.masters, "masters"), (self.exp_avg, "exp_avg"), (self.exp_avg_sq, "exp_avg_sq")):
            buffer.copy_(state[name])
        for entry in self._adamw.state.values():
            entry["step"].fill_(float(state["applied_steps"]))
        self.attempted_steps = int(state["attempted_steps"])
        self.skipped_in_row = int(state["skipped_in_row"])
        self._publish()


def _add_widened(flat: Tensor, gradient: Tensor) -> None:
    """flat += gradient, in the dtype of `flat`."""
    if flat.dtype == gradient.dtype or flat.device.type != "cpu":
        flat.add_(gradient)
        return
    # A CPU sum of two dtypes is not vectorised: widening pieces first takes a quarter of its time.
    pieces = zip(flat.view(-1).split(CACHE_CHUNK), gradient.reshape(-1).split(CACHE_CHUNK), strict=True)
    for target, source in pieces:
        target.add_(source.to(flat.dtype))


def _norm(flat: Tensor) -> float:
    """Euclidean norm, summed in float64 over chunks in a fixed order."""
    chunk = CACHE_CHUNK if flat.device.type == "cpu" else COPY_CHUNK
    squares = [torch.linalg.vector_norm(piece, dtype=torch.float64) ** 2 for piece in flat.split(chunk)]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0
