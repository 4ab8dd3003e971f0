"""A model that no rank has room for is read by parts: the peak of each rank, measured in processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from plait.launch.local import LocalProcesses
from plait.models.files.saving import save_pretrained
from tests.models.parallel.team_workers import TeamWorker
from tests.models.tiny import tiny_model, tiny_tokenizer

LAYERS, HIDDEN = 24, 512


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny checkpoint, and one of 24 layers and 260 MB in float32."""
    folder = tmp_path_factory.mktemp("checkpoints")
    save_pretrained(tiny_model("llama", dtype=torch.float32), folder / "tiny")
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
    )
    with torch.random.fork_rng(devices=[]):
        module = LlamaForCausalLM._from_config(config)
    module.save_pretrained(folder / "large")
    tiny_tokenizer().save_pretrained(folder / "large")
    return folder / "tiny", folder / "large"


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp": 2}, pytest.param({"pp": 2}, marks=pytest.mark.slow)], ids=str)
def test_a_rank_never_has_more_than_its_part_and_a_few_layers(
    folders: tuple[Path, Path], sizes: dict[str, int]
) -> None:
    tiny, large = folders
    whole = (large / "model.safetensors").stat().st_size
    group: Any = LocalProcesses().start(TeamWorker, 2)
    try:
        run = group.submit(
            range(2), "run", "tests.models.parallel.loading_memory", "peak_of_part", str(tiny), str(large), **sizes
        )
        found = run.result(120.0)
    finally:
        group.close()
    for rank in found:
        assert abs(rank["part"] - whole / 2) < 0.05 * whole
        # Beside the part: the few layers of the proof, twice, and what the allocator keeps of them.
        assert rank["growth"] < rank["part"] + whole / 3, f"{rank}, of {whole} bytes"
