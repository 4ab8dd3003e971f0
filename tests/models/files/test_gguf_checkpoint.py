"""The checkpoint folder made of a GGUF: against the weights that went in, and against Transformers' own reading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from plait.models.files.gguf_checkpoint import write_checkpoint
from tests.models.tiny_gguf import TINY_CONFIG


@pytest.fixture(scope="module")
def checkpoint(tiny_gguf: tuple[Path, dict[str, np.ndarray]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    shares: list[float] = []
    write_checkpoint(
        tiny_gguf[0], folder, TINY_CONFIG, {"eos_token_id": 2, "pad_token_id": 2}, on_progress=shares.append
    )
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    return folder


def test_weights_come_out_as_they_went_in(checkpoint: Path, tiny_gguf: tuple[Path, dict[str, np.ndarray]]):
    loaded = load_file(checkpoint / "model.safetensors")
    assert loaded.keys() == tiny_gguf[1].keys()
    for name, expected in tiny_gguf[1].items():
        assert loaded[name].dtype == np.float32
        np.testing.assert_array_equal(loaded[name], expected, err_msg=name)


def test_the_folder_equals_what_transformers_reads_from_the_gguf(checkpoint: Path, tiny_gguf: tuple[Path, dict]):
    ours = AutoModelForCausalLM.from_pretrained(checkpoint)
    theirs = AutoModelForCausalLM.from_pretrained(tiny_gguf[0].parent, gguf_file=tiny_gguf[0].name)
    assert ours.dtype == torch.float32
    assert ours.lm_head.weight.data_ptr() == ours.model.embed_tokens.weight.data_ptr(), "tied"
    assert ours.config.rope_parameters["rope_theta"] == 100000.0
    assert (ours.generation_config.eos_token_id, ours.generation_config.pad_token_id) == (2, 2)
    token_ids = torch.randint(0, TINY_CONFIG["vocab_size"], (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(token_ids).logits, theirs(token_ids).logits, rtol=1e-5, atol=1e-5)


def test_the_tokenizer_splits_digits_and_knows_its_specials(checkpoint: Path):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.tokenize("ab  17") == ["ab", "ĠĠ", "1", "7"], "two spaces are one piece only if digits stand apart"
    assert tokenizer("<|im_start|>b<|im_end|>")["input_ids"] == [1, tokenizer.convert_tokens_to_ids("b"), 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (
        1,
        2,
        2,
        0,
    )
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab 1"}], tokenize=False)
    assert chat == "<|im_start|>user\nab 1<|im_end|>\n"
    ids = tokenizer(chat)["input_ids"]
    assert tokenizer.decode(ids) == chat
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nab 1\n"
    assert tokenizer.model_max_length == 128


def test_a_config_that_is_not_the_ggufs_is_our_own_fault(tiny_gguf: tuple[Path, dict], tmp_path: Path):
    with pytest.raises(AssertionError, match=r"'hidden_size': \(32, 64\)"):
        write_checkpoint(tiny_gguf[0], tmp_path, {**TINY_CONFIG, "hidden_size": 32}, {})
