"""Tiny random models of many families, and a tiny tokenizer, shared by all tests.

`tiny(family)` gives the bare Transformers module, which needs no plait; `tiny_model(family, dtype)` wraps it in a
LanguageModel.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from plait.models.language_model import LanguageModel

END_OF_TURN = "<|im_end|>"
CORPUS = (
    "the sum of two numbers is another number",
    "what is 3 plus 4? the answer is 7.",
    "what is 12 minus 5? the answer is 7.",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20",
    "a quick brown fox jumps over the lazy dog",
    "question: answer: user assistant system",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 320
"""Rows of the tiny models' embedding: the tokenizer's ids and a few that no token has."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
WIDE_MOE = {**MOE, "moe_intermediate_size": None}
"""Of experts as wide as an MLP, of which ranks of tensor parallelism have columns; of others they have whole ones."""
ALTERNATING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "mixtral": {"sliding_window": None, **WIDE_MOE},
    "qwen3_moe": {**MOE, "norm_topk_prob": True},
    "gemma": {},
    "gemma2": {
        **ALTERNATING,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {**ALTERNATING, "query_pre_attn_scalar": 8},
    "gpt_oss": {**ALTERNATING, **WIDE_MOE},
    "olmo2": {},
    "phi3": {},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.25},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {"sliding_window": 5},
    "glm": {},
    "gpt_neox": {},
    "deepseek_v3": MLA,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "olmo3": ALTERNATING,
    "cohere2": {**ALTERNATING, "logit_scale": 0.25},
    "glm4": {},
    "deepseek_v2": MLA,
}

LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
SHARED_EXPERT = {**MOE, "shared_expert_intermediate_size": 24}
SHORT_CONV = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
    "num_hidden_layers": 3,
}
GRANITE = {"layer_types": LINEAR["layer_types"], "shared_intermediate_size": 24, "attention_multiplier": 0.3}
GRANITE |= {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}
FALCON = {"mamba_d_ssm": 48, "mamba_n_heads": 3, "mamba_n_groups": 3, "key_multiplier": 0.7}
FALCON |= {"ssm_multipliers": [0.5, 1.5, 0.75, 1.25, 0.875], "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.6}
FALCON |= {"mlp_multipliers": [0.8, 1.4], "attention_in_multiplier": 0.9, "attention_out_multiplier": 1.2}
NEMOTRON = {
    **MOE,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 16,
    "time_step_min": 1e-9,  # a limit that `generate` does not have
    "n_routed_experts": 4,
    "moe_shared_expert_intermediate_size": 20,
}
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": LINEAR,
    "qwen3_next": {**LINEAR, **SHARED_EXPERT},
    "qwen3_5_moe_text": {**LINEAR, **SHARED_EXPERT},
    "olmo_hybrid": LINEAR,
    "lfm2": SHORT_CONV,
    "lfm2_moe": {**SHORT_CONV, **MOE, "num_dense_layers": 1},
    "granitemoehybrid": {**MAMBA, **MOE, **GRANITE, "moe_intermediate_size": None, "intermediate_size": 24},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**MAMBA, **FALCON},
    "nemotron_h": NEMOTRON,
}
"""Families with recurrent layers."""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of about 300 tokens; ids: 0 pad, 1 <|im_start|>, 2 <|im_end|> (EOS). Any text round-trips.

    A copy each time: a test may change its template.
    """
    return copy.deepcopy(_trained_tokenizer())


@functools.cache
def _trained_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|pad|>", "<|im_start|>", END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token=END_OF_TURN)
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_config(family: str = "llama", **overrides: Any) -> Any:
    """The configuration of a family at toy size; `overrides` win over the table."""
    return AutoConfig.for_model(
        family, **{**COMMON, **FAMILIES.get(family, {}), **RECURRENT.get(family, {}), **overrides}
    )


def tiny(
    family: str = "llama",
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    weight_scale: float = 0.2,
    **overrides: Any,
) -> Any:
    """A random Transformers causal LM (eager attention, eval). Leaves the global random state as it was.

    Weights are drawn wide (norm weights and biases too), so that an error anywhere shows in the logits.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), attn_implementation="eager")
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for name, param in module.named_parameters():
                noise = torch.randn(param.shape, generator=generator) * weight_scale
                param.copy_(param + noise if param.ndim == 1 or name.endswith("norm.weight") else noise)
    if dtype == torch.float64:
        module.set_experts_implementation("eager")  # grouped matrix products exist up to float32 only
    return module.to(dtype).eval()


_SEEING = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_SEEING |= {"image_size": 28, "patch_size": 14}
_HEARING = {"hidden_size": 16, "intermediate_size": 24, "num_blocks": 1, "num_attention_heads": 2}
_HEARING |= {"ext_pw_out_channel": 16, "nemo_conv_channels": 16}
WITH_IMAGES: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": {**COMMON, **FAMILIES["gemma3_text"]}, "vision_config": _SEEING}
    | {"mm_tokens_per_image": 4},
    "phi4_multimodal": {**COMMON, "pad_token_id": 0}
    | {"vision_config": {**_SEEING, "crop_size": 28, "image_token_id": 290}}
    | {"audio_config": {**_HEARING, "audio_token_id": 291}},
}
"""Models that read images too: gemma3 has its decoder and its encoder side by side, phi4_multimodal has encoders of
images and of sounds inside its decoder."""


def tiny_with_images(family: str = "gemma3", *, dtype: torch.dtype = torch.float32) -> Any:
    """A random model of `WITH_IMAGES`, whose encoders' layers have the names of the decoder's; see `tiny`."""
    config = AutoConfig.for_model(family, **WITH_IMAGES[family])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for param in module.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)
    return module.to(dtype).eval()


def tiny_model(
    family: str = "llama", *, dtype: torch.dtype = torch.float64, device: str = "cpu", **options: Any
) -> LanguageModel:
    """`tiny` (with its options) as an admitted LanguageModel with the tiny tokenizer.

    Its self-check, which takes far longer than the model takes to make, is made once in a process and in those that it
    starts: the weights are the same each time. What is said of a code that is not the same any more is up to the test
    that changes it.
    """
    from plait.models import language_loading

    name, which = str(dtype).removeprefix("torch."), repr((family, dtype, device, sorted(options.items())))
    module = tiny(family, dtype=dtype, **options)
    with _self_check_of(which):
        model = language_loading.from_module(module, tiny_tokenizer(), dtype=name, device=device)
    _CHECKED.add(which)
    return model


def _self_check_of(which: str) -> contextlib.AbstractContextManager[Any]:
    """Within it the self-check of a model of `tiny_model` is none where it has passed, and else passed for all
    processes of these tests: in those of `make test-all`, and of no tests, for this one alone."""
    from plait.models import language_loading

    if which in _CHECKED:
        return mock.patch.object(language_loading, "self_check")
    if os.environ.get("COLD") or "PLAIT_CACHE" not in os.environ:
        return contextlib.nullcontext()
    return mock.patch.object(language_loading, "self_check", self_check_once())


@functools.cache
def shared_model(family: str = "llama", dtype: torch.dtype = torch.float64) -> LanguageModel:
    """`tiny_model`, the same one for all who ask: nobody may change it."""
    return tiny_model(family, dtype=dtype)


_CHECKED: set[str] = set()
"""Models of `tiny_model` that have passed their self-check."""
MOST_WAITED_S = 2.0
"""For another process that checks the same model."""


@contextlib.contextmanager
def checked_once() -> Iterator[None]:
    """Within it models that are loaded pass their self-check once, for the same weights and configuration."""
    from plait.models import language_loading, scalar_loading

    once = self_check_once()
    with mock.patch.object(language_loading, "self_check", once), mock.patch.object(scalar_loading, "self_check", once):
        yield


def self_check_once() -> Callable[[Any, str], float]:
    """`admission.self_check`, passed once for the same weights and configuration: in this process, and in all that have
    its cache of tests when they check. A process may have been made where that was another (`warm`)."""
    from plait.models.admission import self_check

    def once(model: Any, name: str) -> float:
        said = f"{type(model.module).__name__} {model.weights.dtype} {model.module.config.to_json_string()}"
        which = hashlib.sha256(said.encode())
        which.update(model.weights.detach().cpu().flatten().view(torch.uint8).numpy())
        passed = Path(os.environ["PLAIT_CACHE"]) / "self-checks"
        passed.mkdir(parents=True, exist_ok=True)
        with (passed / which.hexdigest()).open("a+") as file:
            if not _locked(file):
                return self_check(model, name)
            file.seek(0)
            if (error := file.read()) == "":
                file.write(error := repr(self_check(model, name)))
                file.flush()
            return float(error)

    return once


def _locked(file: IO[str]) -> bool:
    """Whether nobody else checks the same model. Who does is waited for, not for long: a test may have stopped it."""
    until = time.monotonic() + MOST_WAITED_S
    while time.monotonic() < until:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        else:
            return True
    return False


def save_tiny(folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A `tiny_model` (with its options) and its tokenizer as a checkpoint; returns the folder."""
    from plait.models.files.saving import save_pretrained

    save_pretrained(tiny_model(dtype=dtype, **options), folder)
    return folder


def tiny_llama(dtype: torch.dtype = torch.float64, **options: Any) -> LanguageModel:
    """The model most tests want: a two-layer llama with tied embeddings."""
    return tiny_model("llama", dtype=dtype, **options)
