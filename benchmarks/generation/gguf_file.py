"""A llama checkpoint folder as a GGUF file of floats, for llama.cpp: the same weights in the same dtype."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors import safe_open

_TYPES = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}


def write_gguf(folder: Path, path: Path, dtype: str) -> None:
    """Write the weights of `folder` to `path`, rounded to `dtype`; norms stay float32, as llama.cpp wants them.

    Without a vocabulary, since the benchmark speaks in token ids.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(str(path), "llama")
    _write_config(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    with safe_open(folder / "model.safetensors", framework="numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
            values = tensors.get_tensor(name).astype(np.float32)
            if name.endswith("q_proj.weight"):
                values = _permute(values, config["num_attention_heads"])
            elif name.endswith("k_proj.weight"):
                values = _permute(values, config["num_key_value_heads"])
            kind = _TYPES[dtype] if values.ndim > 1 else gguf.GGMLQuantizationType.F32
            theirs = names.get_name(name, try_suffixes=(".weight",))
            assert theirs is not None, f"llama.cpp's llama has no {name}"
            writer.add_tensor(theirs, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_config(writer: gguf.GGUFWriter, config: dict) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("none")


def _permute(weight_OI: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's row order: it rotates neighbouring pairs (2i, 2i+1), Transformers rotates (i, i + D/2)."""
    rows, columns = weight_OI.shape
    halves = weight_OI.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
