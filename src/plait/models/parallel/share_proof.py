"""That a family computes with weights which are gathered a layer at a time is shown, not assumed: forward and backward
of a few tokens with them, against the same with all weights there. A parameter that is read where its layer is not
gathered has no numbers, and so nothing that comes of it has any.

Shapes: T tokens of a packed row, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.data.packed import PackedBatch
from plait.errors import ModelError, PlaitError
from plait.models.compute.attention import PackedContext
from plait.models.compute.row_attention import pieces_plan
from plait.models.parallel.team import Team

TOLERANCE = 1e-3
"""Largest accepted difference, relative to the size: layers compute the same with the same numbers."""


class ShareProof:
    """Made of a rank's part of a model whose weights are all there; `check` when it holds a share of them.

    Args:
        model: language or scalar model.
        batch: tokens of the whole model's vocabulary.
    """

    def __init__(self, model: Any, team: Team, batch: PackedBatch) -> None:
        self._model, self._team, self._batch = model, team, batch
        self._expected = self._computed()

    def check(self) -> None:
        """Raises ModelError, on every rank of the team, where one computes something else, or nothing."""
        try:
            found, fault = self._computed(), 0.0
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, AssertionError) as error:
            if isinstance(error, PlaitError):
                raise
            raise self._refusal(f"{type(error).__name__}: {error}") from error
        for mine, theirs in zip(found, self._expected, strict=True):
            size = float(theirs.double().norm())
            if not float((mine.double() - theirs.double()).norm()) <= TOLERANCE * (size or 1.0):
                fault = 1.0
        count = torch.tensor([fault], device=self._model.device)
        if self._team.all.all_reduce(count, "max").item():
            raise self._refusal("hidden states or gradients are others")

    def _refusal(self, cause: str) -> ModelError:
        module = self._model.module
        return ModelError(
            f"model: {type(module.base_model).__name__} (family {module.config.model_type}) cannot compute with "
            f"weights that are gathered layer by layer: {cause}. Set `optimizer.shard_weights` to false, or the role's "
            "model to another family."
        )

    def _computed(self) -> list[Tensor]:
        """What this rank's stage makes of the tokens, [T, H], and the gradients of its parameters."""
        model, batch, layers = self._model, self._batch, self._model.backbone.layer_weights
        params = [model.module.get_parameter(block.param.name) for block in model.layout.blocks]
        required = [param.requires_grad for param in params]
        inputs_TH = None if self._team.is_first_stage else self._random(batch.num_tokens)
        context = PackedContext(batch, planned=pieces_plan)
        for param in params:
            param.requires_grad_(True)
        try:
            with torch.enable_grad(), layers.forward():
                out_TH = model.backbone.hidden(batch.token_ids_T, batch.position_ids_T, context, inputs_TH=inputs_TH)
            with layers.backward(lambda layer: None):
                grads = torch.autograd.grad(out_TH, params, self._random(len(out_TH)), allow_unused=True)
            return [out_TH.detach(), *(grad for grad in grads if grad is not None)]
        finally:
            for param, before in zip(params, required, strict=True):
                param.requires_grad_(before)
            layers.rest()

    def _random(self, num_tokens: int) -> Tensor:
        """[T, H]"""
        generator = torch.Generator().manual_seed(0)
        size = num_tokens, self._model.config.get_text_config().hidden_size
        return torch.randn(size, generator=generator, dtype=torch.float64).to(self._model.device, self._model.dtype)
