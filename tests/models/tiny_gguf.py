"""A tiny Llama as a GGUF, written as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from transformers import LlamaForCausalLM

from plait.models.files import hub

ALIAS = "smollm2-135m-instruct"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
CONTROL, NORMAL = 3, 1


def tiny_tokens() -> tuple[list[str], list[str]]:
    """The specials, the printable ASCII bytes as byte-level BPE writes them (space is Ġ, newline is Ċ), two merges."""
    letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "ab", "ĠĠ"], ["a b", "Ġ Ġ"]


TINY_CONFIG = {
    **hub.ALIASES[ALIAS].config,
    "vocab_size": len(tiny_tokens()[0]),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def write_gguf(path: Path, model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """Write `model` as llama.cpp's converter does, matrices as Q4_1 and the embedding as Q8_0; return the weights
    that a reader finds, by their Transformers names."""
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(config.vocab_size)
    tokens, merges = tiny_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token.startswith("<|") else NORMAL for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)

    layer_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    found = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:  # as in llama.cpp's convert_hf_to_gguf.py
            rows, columns = values.shape
            values = values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        kind = gguf.GGMLQuantizationType.F32
        if values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0 if "embed" in name else gguf.GGMLQuantizationType.Q4_1
            values = gguf.quants.quantize(values, kind)
        stem = layer_names.get_name(name.removesuffix(".weight"))
        writer.add_tensor(f"{stem}.weight", values, raw_dtype=kind)
        plain = gguf.quants.dequantize(values, kind) if tensor.ndim == 2 else values
        if heads:
            rows, columns = plain.shape
            plain = plain.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        found[name] = plain
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found
