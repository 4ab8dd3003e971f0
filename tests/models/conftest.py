"""A tiny GGUF for the tests of the checkpoint and of the hub."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.tiny_gguf import TINY_CONFIG, write_gguf


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A GGUF file, and the weights in it by their Transformers names."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_gguf(path, LlamaForCausalLM(LlamaConfig(**TINY_CONFIG)).eval())
