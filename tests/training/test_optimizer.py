"""The optimizer against plain torch.optim.AdamW, clipping, skipped steps, and what bfloat16 weights see."""

from __future__ import annotations

import copy

import pytest
import torch

from plait.errors import RunError
from plait.models.language_model import LanguageModel
from plait.training.gradients import CACHE_CHUNK, add_widened
from plait.training.memory import parameter_bytes
from plait.training.optimizer import MasterOptimizer, sum_of_squares
from plait.training.settings import OptimizerSettings
from tests.models.tiny import tiny_llama, tiny_model


def optimizer_of(model: LanguageModel, total_steps: int = 10, **settings) -> MasterOptimizer:
    return MasterOptimizer(model, OptimizerSettings(**settings), total_steps)


def random_gradients(optimizer: MasterOptimizer, layout, seed: int) -> None:
    """Fill the parameters' part of the buffer; the alignment gaps stay 0, as a backward pass leaves them."""
    generator = torch.Generator().manual_seed(seed)
    optimizer.collected.zero()
    for _, start, stop in layout.entries:
        optimizer.gradients[start:stop] = torch.randn(stop - start, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_masters_equal_plain_adamw(dtype):
    """Bit for bit the fused kernel on separate tensors, and to rounding the plain one."""
    model = tiny_llama(dtype)
    model.module.requires_grad_(False)
    optimizer = optimizer_of(model, learning_rate=1e-2, weight_decay=0.1, betas=(0.8, 0.9), max_grad_norm=float("inf"))
    names = [block.param.name for block in model.layout.blocks]
    master_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    references = {}
    for kind in ("fused", "plain"):
        params = {name: model.module.get_parameter(name).detach().to(master_dtype).clone() for name in names}
        groups = [
            {"params": [p for p in params.values() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in params.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        references[kind] = params, torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), fused=kind == "fused")
    assert any(p.ndim < 2 for p in params.values()), "norm weights are part of the test"
    for step in range(4):
        random_gradients(optimizer, model.layout, step)
        for params, adamw in references.values():
            for block, start, stop in model.layout.entries:
                params[block.param.name].grad = optimizer.gradients[start:stop].view(block.shape).clone()
            adamw.step()
        optimizer.step(loss_is_finite=True)
    for block, start, stop in model.layout.entries:
        name = block.param.name
        found = optimizer.masters[start:stop].view(block.shape)
        assert torch.equal(found, references["fused"][0][name])
        torch.testing.assert_close(found, references["plain"][0][name], rtol=1e-6, atol=1e-7)
        assert torch.equal(model.module.get_parameter(name), found.to(dtype)), "the module sees the new weights"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_step_is_seen_by_what_goes_by_the_version_of_the_weights(dtype):
    """An engine forgets keys and values of older weights, also where the working weights are the masters."""
    model = tiny_llama(dtype)
    model.module.requires_grad_(False)
    optimizer, before = optimizer_of(model), model.weights_version
    random_gradients(optimizer, model.layout, 0)
    optimizer.step(loss_is_finite=True)
    assert model.weights_version != before


def test_small_steps_add_up_in_bfloat16():
    """Near 0.02 half a unit in the last place of bfloat16 is 2^-14 = 6.1e-5: one step of 1e-6 is lost, 100 are not."""
    model = tiny_llama(torch.bfloat16)
    before = model.weights.clone()
    optimizer = optimizer_of(model, learning_rate=1e-6, max_grad_norm=float("inf"))
    start_masters = optimizer.masters.clone()
    near = (before.abs() > 2**-6) & (before.abs() < 2**-5)
    assert near.sum() > 1000
    for step in range(100):
        optimizer.gradients.fill_(1.0)
        optimizer.step(loss_is_finite=True)
        if step == 0:
            moved = (start_masters - optimizer.masters)[near]
            torch.testing.assert_close(moved, torch.full_like(moved, 1e-6), rtol=0.01, atol=0)
            assert torch.equal(model.weights[near], before[near]), "a single step cannot show in bfloat16"
    assert (model.weights[near] < before[near]).all()


def test_clipping_is_by_the_global_norm():
    model = tiny_llama(torch.float64)
    optimizer = optimizer_of(model, max_grad_norm=2.0)
    places = [model.layout.entries[0][1], model.layout.entries[-1][1]]
    optimizer.gradients[places[0]] = 3.0
    optimizer.gradients[places[1]] = -4.0
    report = optimizer.step(loss_is_finite=True)
    assert report.grad_norm == pytest.approx(5.0)
    assert optimizer.gradients[places].tolist() == pytest.approx([3 * 2 / 5, -4 * 2 / 5])


def test_a_small_gradient_is_not_clipped():
    optimizer = optimizer_of(tiny_llama(torch.float64), max_grad_norm=2.0)
    optimizer.gradients[0] = 1.5
    assert optimizer.step(loss_is_finite=True).grad_norm == pytest.approx(1.5)
    assert optimizer.gradients[0] == 1.5


def test_the_learning_rate_follows_attempted_steps():
    optimizer = optimizer_of(tiny_llama(torch.float64), total_steps=4, learning_rate=8.0, schedule="linear")
    rates = [optimizer.step(loss_is_finite=step != 1).learning_rate for step in range(4)]
    assert rates == [8, 6, 4, 2]
    assert int(optimizer.state()["applied_steps"]) == 3


@pytest.mark.parametrize("cause", ["loss", "nan gradient", "infinite gradient"])
def test_a_step_that_is_not_finite_changes_nothing(cause):
    model = tiny_llama(torch.float32)
    optimizer = optimizer_of(model, max_skipped_steps=3)
    optimizer.gradients.fill_(1.0)
    optimizer.step(loss_is_finite=True)
    before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    for skipped in (1, 2):
        optimizer.gradients.fill_(1.0)
        optimizer.gradients[5] = {"loss": 1.0, "nan gradient": float("nan"), "infinite gradient": float("inf")}[cause]
        assert optimizer.step(loss_is_finite=cause != "loss").skipped
        after = optimizer.state()
        assert all(torch.equal(after[name], before[name]) for name in ("masters", "exp_avg", "exp_avg_sq"))
        assert int(after["applied_steps"]) == 1
        assert int(after["skipped_in_row"]) == skipped
    optimizer.collected.zero()
    assert not optimizer.step(loss_is_finite=True).skipped
    assert int(optimizer.state()["skipped_in_row"]) == 0
    for _ in range(2):
        optimizer.step(loss_is_finite=False)
    with pytest.raises(RunError, match=r"3 optimizer steps in a row .*optimizer.max_skipped_steps"):
        optimizer.step(loss_is_finite=False)


def test_hooks_gather_gradients_in_the_master_dtype():
    """Two backward passes: the buffer holds their float32 sum, no parameter keeps a gradient, no hook stays."""
    model = tiny_llama(torch.bfloat16)
    model.module.requires_grad_(True)
    optimizer = optimizer_of(model)
    weight = model.module.get_parameter("model.norm.weight")
    _, start, stop = next(entry for entry in model.layout.entries if entry[0].param.name == "model.norm.weight")
    for value in (1.0, 1 / 256 + 1 / 512):  # 1 + 3/512 is no bfloat16 number
        with optimizer.collecting_gradients():
            (weight * torch.tensor(value, dtype=torch.bfloat16)).sum().backward()
        assert weight.grad is None
    assert optimizer.gradients[start:stop].unique().tolist() == [1 + 3 / 512]
    assert optimizer.gradients.count_nonzero() == stop - start
    weight.sum().backward()
    assert weight.grad is not None
    assert optimizer.gradients[start].item() == 1 + 3 / 512


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_memory_estimate_counts_what_is_held(dtype):
    model = tiny_llama(getattr(torch, dtype))
    optimizer = optimizer_of(model)
    buffers = (model.weights, optimizer.masters, optimizer.gradients, optimizer.exp_avg, optimizer.exp_avg_sq)
    held = {buffer.data_ptr(): buffer.numel() * buffer.element_size() for buffer in buffers}
    assert sum(held.values()) == parameter_bytes(dtype, trained=True).total * model.layout.num_elements


def test_state_of_another_model_is_refused():
    optimizer = optimizer_of(tiny_llama(torch.float32))
    other = optimizer_of(tiny_model("qwen2", dtype=torch.float32)).state()
    with pytest.raises(RunError, match=r"`masters`: expected torch.float32 .*another model or another dtype"):
        optimizer.load_state(other)
    partial = copy.copy(optimizer.state())
    del partial["exp_avg"]
    with pytest.raises(RunError, match=r"`exp_avg`: expected .* found nothing"):
        optimizer.load_state(partial)


def test_sums_over_chunks():
    """Buffers longer than a chunk, not a multiple of one; gradients that are not contiguous."""
    elements = 2 * CACHE_CHUNK + 7
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(elements, generator=generator)
    gradient = torch.randn(elements, generator=generator).bfloat16()
    expected = flat + gradient.float()
    add_widened(flat, gradient)
    assert torch.equal(flat, expected)
    square = torch.zeros(4, 3)
    add_widened(square, torch.arange(12.0).bfloat16().view(3, 4).t())
    assert square[1].tolist() == [1, 5, 9]
    assert float(sum_of_squares(torch.full((elements,), 3.0))) == pytest.approx(9 * elements, rel=1e-12)


def test_what_follows_is_an_average_of_the_masters():
    model = tiny_llama(torch.float64)
    followed = MasterOptimizer(model, OptimizerSettings(), total_steps=3, is_followed=True)
    began = followed.masters.clone()
    followed.masters.add_(1.0)
    followed.average(0.25)
    torch.testing.assert_close(followed.buffers()["averaged"], began + 0.25)
    followed.average(0.5)
    torch.testing.assert_close(followed.buffers()["averaged"], began + 0.625)
    assert "averaged" not in optimizer_of(tiny_llama(torch.float64)).buffers(), "nothing follows"
