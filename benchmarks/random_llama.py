"""A random Llama with a tokenizer of words, where a benchmark needs no trained model. Runs without plait."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def word_tokenizer(vocabulary: int) -> Any:
    """Token i is the word `wi`, from 2 on, with white space between words; 0 ends a text and pads, 1 is unknown."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<eos>": 0, "<unk>": 1} | {f"w{i}": i for i in range(2, vocabulary)}
    words: Any = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")


def write_llama(
    folder: Path,
    tokenizer: Any,
    *,
    hidden: int,
    intermediate: int,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    positions: int,
    scalar: bool = False,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
) -> None:
    """Write a checkpoint with the tokenizer's vocabulary; `scalar`: a sequence classifier of one label; `device`: draws
    the weights, a GPU a billion of them in a second."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    config: Any = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    if scalar:
        config.num_labels = 1
    torch.manual_seed(seed)
    with torch.device(device):
        model: Any = (LlamaForSequenceClassification if scalar else LlamaForCausalLM)(config)
    model.to("cpu", getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_stages(folder: Path, vocabulary: int, layers: int, *, is_tiny: bool) -> None:
    """A random Llama of words that divides into equal stages: its head is small."""
    hidden, intermediate = (64, 128) if is_tiny else (512, 2048)
    write_llama(
        folder,
        word_tokenizer(vocabulary),
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=8,
        kv_heads=8,
        positions=1024,
    )
