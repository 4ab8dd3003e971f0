"""A GGUF file of the llama architecture turned into a Hugging Face checkpoint folder.

Only what a known, hash-checked file needs: every block format that the `gguf` package can dequantise, a
byte-level BPE tokenizer, tied embeddings. The numbers are those of llama.cpp's dequantisation in float32,
where `scale * q + offset` of 16-bit scales is exact; rounding to bfloat16 is left to the run that wants it.

This module needs neither torch nor transformers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from plait.models.files.tensor_file import TensorEntry, write_tensor_file

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROOT_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


def write_checkpoint(
    source: str | Path,
    folder: str | Path,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    *,
    on_progress: Callable[[float], None] = lambda _share: None,
) -> None:
    """Write config.json, generation_config.json, the tokenizer's files and model.safetensors into `folder`.

    source: a GGUF file; folder: exists, is empty; config: the checkpoint's config.json, whose sizes and token
    ids must be those that the GGUF states (asserted); on_progress: called with the share of the weights done.
    All files are forced to disk. Raises `OSError` (disk full) as the file system gives it.
    """
    folder = Path(folder)
    reader = gguf.GGUFReader(str(source))
    _check_config(reader, config)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config)
    _write_tokenizer(reader, folder, config)

    sources = {_parameter_name(tensor.name): tensor for tensor in reader.tensors}
    if config["tie_word_embeddings"]:
        sources.pop("lm_head.weight", None)
    entries = [TensorEntry(name, "F32", _shape(tensor)) for name, tensor in sources.items()]
    total_bytes = sum(entry.num_bytes for entry in entries)
    done_bytes = 0

    def data(entry: TensorEntry) -> memoryview:
        nonlocal done_bytes
        values = _dequantise(sources[entry.name], entry.name, config)
        done_bytes += entry.num_bytes
        on_progress(done_bytes / total_bytes)
        return values.data

    write_tensor_file(folder / "model.safetensors", entries, data, metadata={"format": "pt"})


def _check_config(reader: gguf.GGUFReader, config: Mapping[str, Any]) -> None:
    stated = {
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": _field(reader, "llama.attention.head_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        # the GGUF holds epsilon as float32
        "rms_norm_eps": float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
    }
    wrong = {key: (config[key], value) for key, value in stated.items() if config[key] != value}
    assert not wrong, f"config and GGUF disagree (config, GGUF): {wrong}"


def _field(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.fields.get(key)
    assert field is not None, f"the GGUF states no {key}; is it of the llama architecture?"
    return field.contents()


def _parameter_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, module = stem.split(".")
        return f"model.layers.{layer}.{_LAYER_NAMES[module]}.{kind}"
    return f"{_ROOT_NAMES[stem]}.{kind}"


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    """GGUF states the fastest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _dequantise(tensor: gguf.ReaderTensor, name: str, config: Mapping[str, Any]) -> np.ndarray:
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(_shape(tensor))
    if name.endswith("q_proj.weight"):
        values = unpermute(values, config["num_attention_heads"])
    elif name.endswith("k_proj.weight"):
        values = unpermute(values, config["num_key_value_heads"])
    return np.ascontiguousarray(values, dtype="<f4")


def unpermute(weight_OI: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's row order: it rotates neighbouring pairs (2i, 2i+1), Transformers rotates (i, i + D/2)."""
    rows, columns = weight_OI.shape
    pairs = weight_OI.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(reader: gguf.GGUFReader, folder: Path, config: Mapping[str, Any]) -> None:
    """The tokenizer as `tokenizers` holds it: digits one by one, then GPT-2's byte-level BPE ("smollm")."""
    assert (_field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre")) == ("gpt2", "smollm"), (
        "only SmolLM's byte-level BPE is known here"
    )
    assert not _field(reader, "tokenizer.ggml.add_bos_token"), "a tokenizer that adds BOS needs a post-processor"
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = _field(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    assert tokenizer.get_vocab_size() == len(tokens), "special tokens must be in the vocabulary already"

    tokenizer.save(str(folder / "tokenizer.json"))
    _force_to_disk(folder / "tokenizer.json")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[config["bos_token_id"]],
            "eos_token": tokens[config["eos_token_id"]],
            "pad_token": tokens[config["pad_token_id"]],
            "unk_token": tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": _field(reader, "tokenizer.chat_template"),
        },
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _force_to_disk(path)


def _force_to_disk(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
