"""Gradients of a trainer against those of a module that somebody else has trained."""

from __future__ import annotations

import torch

from plait.training.trainer import Trainer


def assert_equal_gradients(trainer: Trainer, module: torch.nn.Module, tolerance: float) -> None:
    """`tolerance` is a part of the largest gradient."""
    theirs = {name: param.grad for name, param in module.named_parameters()}
    largest = max(grad.abs().max().item() for grad in theirs.values() if grad is not None)
    assert largest > 0.02
    for block, start, stop in trainer.model.layout.entries:
        found = trainer.optimizer.gradients[start:stop].view(block.shape)
        expected = theirs[block.param.name]
        expected = torch.zeros_like(found) if expected is None else expected
        assert (found - expected).abs().max() <= tolerance * largest, block.param.name
