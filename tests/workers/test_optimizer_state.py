"""The optimizer's state in a checkpoint: what one kind of run saves, either kind loads, bit for bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch
from torch.nn import functional as F

from plait.checkpoint.store import CheckpointStore
from plait.errors import RunError, UserError
from plait.layout.mesh import Cluster
from plait.layout.params import ALIGNMENT_ELEMENTS
from plait.models.files.finite import Broken
from plait.models.files.tensor_file import FileDigest
from plait.models.language_model import LanguageModel
from plait.schedule.work import to_the_end
from plait.training.optimizer import MasterOptimizer
from plait.training.settings import OptimizerSettings
from plait.workers.optimizer_state import broken_state, loading_state, read_masters, refuse_broken, saving_state
from tests.models.tiny import tiny_model

ALONE = Cluster(1, 1)


def trained_of(model: LanguageModel) -> Any:
    return SimpleNamespace(role="actor", optimizer=MasterOptimizer(model, OptimizerSettings(learning_rate=1e-2), 9))


def after_two_steps(model: LanguageModel) -> Any:
    """What is trained on random gradients, the second time on none that are finite."""
    trained = trained_of(model)
    generator = torch.Generator().manual_seed(3)
    for is_finite in (True, False):
        for _, start, stop in model.layout.entries:
            trained.optimizer.gradients[start:stop] = torch.randn(stop - start, generator=generator)
        trained.optimizer.step(loss_is_finite=is_finite)
    return trained


def loaded(
    folder: Path, counts: dict[str, int] | None, family: str = "llama"
) -> tuple[LanguageModel, dict[str, torch.Tensor]]:
    """A model and an optimizer of their own, after they have read the folder."""
    model = tiny_model(family, dtype=torch.bfloat16)
    trained = trained_of(model)
    to_the_end(loading_state(trained, model.trained.parameters, ALONE, 0, folder, counts))
    return model, trained.optimizer.state()


def assert_same(model: LanguageModel, state: dict[str, torch.Tensor], first: LanguageModel, trained: Any) -> None:
    expected = trained.optimizer.state()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
    assert torch.equal(model.trained.weights, first.trained.weights), "the working weights follow"


def test_parts_come_back_bit_for_bit(tmp_path: Path) -> None:
    first = tiny_model("llama", dtype=torch.bfloat16)
    trained = after_two_steps(first)
    counts, digests = to_the_end(saving_state(trained, ALONE, 0, tmp_path))
    assert digests == {
        path.name: FileDigest(path.stat().st_size, crc32(path.read_bytes())) for path in tmp_path.iterdir()
    }
    assert counts == {"attempted_steps": 2, "applied_steps": 1, "skipped_in_row": 1}
    assert_same(*loaded(tmp_path, counts), first, trained)


def test_what_one_process_saved_is_loaded_as_well(tmp_path: Path) -> None:
    first = tiny_model("llama", dtype=torch.bfloat16)
    trained = after_two_steps(first)
    tensors = {f"actor/{name}": tensor for name, tensor in trained.optimizer.state().items()}
    folder = CheckpointStore(tmp_path / "checkpoints", keep_last=1).save(2, tensors, {})
    assert_same(*loaded(folder, None), first, trained)


def test_what_one_process_saved_has_each_bias_behind_its_weight(tmp_path: Path) -> None:
    """As modules have them; buffers of today have biases of queries, keys and values behind the weights of all."""
    first = tiny_model("qwen2", dtype=torch.bfloat16)
    trained = after_two_steps(first)
    places = {block.param.name: slice(start, stop) for block, start, stop in first.layout.entries}

    def stored(state: torch.Tensor) -> torch.Tensor:
        if state.ndim == 0:
            return state
        pieces = [state[places[name]] for name, _ in first.module.named_parameters()]
        return torch.cat([F.pad(piece, (0, -len(piece) % ALIGNMENT_ELEMENTS)) for piece in pieces])

    tensors = {f"actor/{name}": stored(tensor) for name, tensor in trained.optimizer.state().items()}
    assert not torch.equal(tensors["actor/masters"], trained.optimizer.masters)
    folder = CheckpointStore(tmp_path / "checkpoints", keep_last=1).save(2, tensors, {})
    assert_same(*loaded(folder, None, "qwen2"), first, trained)


@pytest.mark.parametrize("in_parts", [True, False])
def test_what_another_model_saved_says_what_resuming_needs(tmp_path: Path, *, in_parts: bool) -> None:
    trained, counts, folder = after_two_steps(tiny_model("gpt2", dtype=torch.bfloat16)), None, tmp_path
    if in_parts:
        counts, _ = to_the_end(saving_state(trained, ALONE, 0, folder))
    else:
        tensors = {f"actor/{name}": tensor for name, tensor in trained.optimizer.state().items()}
        folder = CheckpointStore(tmp_path / "checkpoints", keep_last=1).save(2, tensors, {})
    with pytest.raises(UserError, match=r"; --resume .* needs the model of actor .*: put .* another `run_dir`$"):
        loaded(folder, counts)


def test_masters_alone_become_the_weights_of_a_whole_model(tmp_path: Path) -> None:
    first = tiny_model("llama", dtype=torch.bfloat16)
    to_the_end(saving_state(after_two_steps(first), ALONE, 0, tmp_path))
    other = tiny_model("llama", dtype=torch.bfloat16)
    assert not torch.equal(other.trained.weights, first.trained.weights)
    read_masters(other, "actor", tmp_path)
    assert torch.equal(other.trained.weights, first.trained.weights)


def test_parameters_that_are_no_numbers_are_named_and_refused() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    trained = after_two_steps(model)
    assert broken_state(trained, 0) == []
    refuse_broken([])
    block, start, stop = model.layout.entries[1]
    trained.optimizer.masters[start] = float("nan")
    trained.optimizer.exp_avg[start : start + 2] = float("inf")
    name, total = block.param.name, stop - start
    assert broken_state(trained, 0) == [
        Broken(f"actor.masters of {name}", 1, total),
        Broken(f"actor.exp_avg of {name}", 2, total),
    ]
    with pytest.raises(RunError, match=rf"actor.masters of {name} \(1 of {total} elements\), .*is not saved \(a lower"):
        refuse_broken(broken_state(trained, 0))
