"""Working weights in one flat buffer; checkpoints read and written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from plait import output
from plait.data.packed import pack
from plait.errors import ModelError
from plait.layout.params import ALIGNMENT_BYTES
from plait.models import scalar_loading
from plait.models.files.saving import save_pretrained
from plait.models.language_loading import from_module, load_model, prepare, read_tokens
from plait.models.parallel import part_loading
from plait.models.scalar_loading import ScalarHead, over_decoder
from tests.cases import slow_but
from tests.models.oracle import RAGGED, eager_logprobs, gradients
from tests.models.tiny import COMMON, FAMILIES, RECURRENT, tiny, tiny_llama, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_parameters_are_aligned_views_of_one_buffer(dtype: torch.dtype) -> None:
    model = tiny_llama(dtype)
    assert model.dtype == dtype
    assert model.weights.shape == (model.layout.num_elements,)
    for block, start, stop in model.layout.entries:
        param = model.module.get_parameter(block.param.name)
        assert param.dtype == dtype
        assert param.data_ptr() == model.weights.data_ptr() + start * model.weights.itemsize
        assert start * model.weights.itemsize % ALIGNMENT_BYTES == 0
        assert torch.equal(model.weights[start:stop], param.detach().flatten())
    with torch.no_grad():
        model.weights.zero_()
    assert not any(param.any() for param in model.module.parameters())


def test_a_tied_embedding_is_one_parameter_with_two_names() -> None:
    tied, untied = tiny_llama(), tiny_llama(tie_word_embeddings=False)
    assert tied.layout.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert untied.layout.num_elements - tied.layout.num_elements == 320 * 32
    assert tied.module.lm_head.weight is tied.module.model.embed_tokens.weight


def test_a_tied_embedding_gets_the_gradient_of_both_ends_at_once() -> None:
    """The gradient hook that the trainer uses fires once, with the sum."""
    model, module = tiny_llama(), tiny("llama")
    fired = []
    model.module.lm_head.weight.register_post_accumulate_grad_hook(lambda param: fired.append(param.grad.clone()))
    gradients(model.module, *model.logprobs(pack(RAGGED), 1.0, chunk_rows=4))
    assert len(fired) == 1
    expected = gradients(module, *eager_logprobs(module, RAGGED))["model.embed_tokens.weight"]
    torch.testing.assert_close(fired[0], expected, rtol=0, atol=1e-6)


def test_cut_dims_come_from_the_familys_plan() -> None:
    params = {block.param.name: block.param for block in tiny_model("qwen3_moe").layout.blocks}
    layer = "model.layers.1."
    cuts = {name.removeprefix(layer): (p.cut, p.sections) for name, p in params.items() if name.startswith(layer)}
    assert cuts == {
        "self_attn.q_proj.weight": (0, 1),
        "self_attn.k_proj.weight": (0, 1),
        "self_attn.v_proj.weight": (0, 1),
        "self_attn.o_proj.weight": (1, 1),
        "self_attn.q_norm.weight": (None, 1),
        "self_attn.k_norm.weight": (None, 1),
        "mlp.gate.weight": (None, 1),
        "mlp.experts.gate_up_proj": (0, 1),
        "mlp.experts.down_proj": (0, 1),
        "input_layernorm.weight": (None, 1),
        "post_attention_layernorm.weight": (None, 1),
    }
    assert params["model.embed_tokens.weight"].cut == 0
    assert {p.layer for p in params.values()} == {None, 0, 1}
    assert params["model.norm.weight"].layer is None


def test_a_family_without_a_plan_is_replicated() -> None:
    assert {block.param.cut for block in tiny_model("gpt2").layout.blocks} == {None}


def test_buffers_keep_their_dtype() -> None:
    model = from_module(tiny("llama", dtype=torch.float32), None, "bfloat16")
    assert {buffer.dtype for buffer in model.module.buffers()} == {torch.float32}


def test_end_of_sequence_ids_are_gathered_in_order() -> None:
    module = tiny("llama", dtype=torch.float32, eos_token_id=[7, 9])
    module.generation_config.eos_token_id = [5, 7]
    assert from_module(module, tiny_tokenizer(), "float32").eos_token_ids == (5, 7, 9, 2)


def test_rotary_embeddings_that_change_with_the_batch_limit_the_positions() -> None:
    assert tiny_llama().max_positions == 256
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
    model = tiny_model("phi3", dtype=torch.float32, rope_parameters=longrope, original_max_position_embeddings=64)
    assert model.max_positions == 64


# --- checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    slow_but(
        ["llama", "qwen2", "mixtral", "qwen3_5_text"],
        ["llama", "qwen2", "gemma2", "mixtral", "gpt_oss", "deepseek_v3", "granite", "qwen3_5_text", "lfm2"],
    ),
)
def test_a_saved_folder_loads_in_transformers_and_here(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, dtype=torch.float32, weight_scale=0.05)
    save_pretrained(model, tmp_path / "final")
    assert os.listdir(tmp_path) == ["final"]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "final", attn_implementation="eager").eval()
    with torch.no_grad():
        got = model.logprobs(pack(RAGGED), 1.0)[0]
        torch.testing.assert_close(got, eager_logprobs(theirs, RAGGED)[0], rtol=0, atol=1e-4)
    again = load_model(str(tmp_path / "final"), dtype="float32")
    assert torch.equal(again.weights, model.weights)
    assert again.eos_token_ids == model.eos_token_ids == (2,)
    messages = [{"role": "user", "content": "what is 3 plus 4?"}]
    text = tiny_tokenizer().apply_chat_template(messages, tokenize=False)
    assert AutoTokenizer.from_pretrained(tmp_path / "final").apply_chat_template(messages, tokenize=False) == text


@pytest.mark.parametrize("stated", [True, False], ids=["stated for generation", "by the configuration alone"])
def test_end_tokens_are_known_without_weights(stated: bool, tmp_path: Path) -> None:
    module = tiny("llama", dtype=torch.float32, eos_token_id=[7, 9])
    module.generation_config.eos_token_id = [5, 7]
    save_pretrained(from_module(module, tiny_tokenizer(), "float32"), tmp_path / "it")
    if not stated:
        (tmp_path / "it" / "generation_config.json").unlink()
    tokenizer, ends = read_tokens(str(tmp_path / "it"))
    assert ends == load_model(str(tmp_path / "it"), dtype="float32").eos_token_ids
    assert ends == ((5, 7, 9, 2) if stated else (7, 9, 2))
    assert tokenizer.get_vocab() == tiny_tokenizer().get_vocab()


def test_saved_settings_are_the_models_own(tmp_path: Path) -> None:
    """Neither our attention nor our way of calling it goes into the exported configuration."""
    model = tiny_llama(torch.float32)
    save_pretrained(model, tmp_path / "half", dtype="bfloat16")
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["use_cache"] is True
    assert "plait" not in json.dumps(config)
    stored = load_file(tmp_path / "half" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in stored
    assert model.config.dtype == torch.float32


def test_loading_converts_and_draws_nothing(tmp_path: Path) -> None:
    model = tiny_llama(torch.float32)
    save_pretrained(model, tmp_path / "it")
    state = torch.get_rng_state()
    loaded = load_model(str(tmp_path / "it"), dtype="bfloat16")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(loaded.weights, model.weights.bfloat16())
    assert loaded.config._attn_implementation == "plait"


def test_an_older_folder_is_replaced_and_a_failed_save_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tiny_llama(torch.float32), tiny_llama(torch.float32, seed=3)
    save_pretrained(first, tmp_path / "it")
    sync, calls = output.sync, []

    def full_disk(path: Path) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        sync(path)

    monkeypatch.setattr(output, "sync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_pretrained(second, tmp_path / "it")
    assert os.listdir(tmp_path) == ["it"]
    assert torch.equal(load_model(str(tmp_path / "it"), dtype="float32").weights, first.weights)
    monkeypatch.undo()
    save_pretrained(second, tmp_path / "it")
    assert os.listdir(tmp_path) == ["it"]
    assert torch.equal(load_model(str(tmp_path / "it"), dtype="float32").weights, second.weights)


def test_pickles_are_refused(tmp_path: Path) -> None:
    model = tiny_llama(torch.float32)
    save_pretrained(model, tmp_path / "it")
    (tmp_path / "it" / "model.safetensors").unlink()
    torch.save(model.module.state_dict(), tmp_path / "it" / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"^model: .*safetensors.*pickles"):
        load_model(str(tmp_path / "it"), dtype="float32")


def test_missing_tensors_are_named_and_not_drawn_at_random(tmp_path: Path) -> None:
    save_pretrained(tiny_llama(torch.float32), tmp_path / "it")
    weights = tmp_path / "it" / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 tensors of a LlamaForCausalLM.*model\.layers\.1\.mlp\.up_proj"):
        load_model(str(tmp_path / "it"), dtype="float32")


def test_a_folder_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    save_pretrained(tiny_llama(torch.float32), tmp_path / "it")
    config = tmp_path / "it" / "config.json"
    for model_type, message in (
        ("vit", "family vit, which has no causal language model"),
        ("nothing", "cannot be read"),
    ):
        config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": model_type}))
        with pytest.raises(ModelError, match=rf"^model: .*{message}"):
            load_model(str(tmp_path / "it"), dtype="float32")


def test_a_refused_family_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_pretrained(tiny_llama(torch.float32), tmp_path / "it")
    monkeypatch.setattr(type(tiny("llama")), "_supports_attention_backend", False)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ModelError, match="backend flag"):
        load_model(str(tmp_path / "it"), dtype="float32")


def test_the_table_of_families_is_wide_enough() -> None:
    assert len(FAMILIES) >= 12


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_checkpoint_loads_onto_a_cuda_device(dtype: str, tmp_path: Path) -> None:
    model = tiny_llama(torch.float32)
    save_pretrained(model, tmp_path / "it")
    loaded = load_model(str(tmp_path / "it"), dtype=dtype, device="cuda")
    assert loaded.device.type == "cuda"
    assert all(buffer.device.type == "cuda" for buffer in loaded.module.buffers())
    assert torch.equal(loaded.weights.cpu(), model.weights.to(loaded.dtype))


@pytest.mark.parametrize(("device", "changes"), [("cpu", True), ("cuda", False)])
def test_layers_are_changed_on_a_cpu_alone(device: str, changes: bool) -> None:
    """Torch's compiler, which fuses layers on a GPU, cannot trace them otherwise."""
    module = tiny("llama")
    prepare(module, torch.bfloat16, device)
    assert any("forward" in vars(part) for part in module.modules()) == changes
    decoder = tiny("llama").base_model.to("meta")
    scalar = over_decoder(decoder, None, None, ScalarHead(torch.ones(1, 64), is_stored=False), torch.bfloat16, device)
    assert any("forward" in vars(part) for part in scalar.module.modules()) == changes
    assert scalar.weights.is_meta


@pytest.mark.parametrize(("device", "changes"), [("cpu", True), ("cuda", False)])
@pytest.mark.parametrize("scalar", [False, True])
def test_layers_of_parts_are_changed_on_a_cpu_alone(
    device: str, changes: bool, scalar: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a loader cuts parts from, and gives the weights of its device."""
    save_pretrained(tiny_llama(torch.float32), tmp_path / "it")
    made: list[Any] = []
    for owner, name in ((part_loading, "without_weights"), (scalar_loading, "over_decoder")):
        makes = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *of, makes=makes: made.append(makes(*of)) or made[-1])
    loader = part_loading.PartLoader(dtype="float32", device=device, seed=0, head_std=None)
    loader.parameters(str(tmp_path / "it"), scalar=scalar)
    (model,) = made
    assert any("forward" in vars(part) for part in model.module.modules()) == changes
    assert model.weights.is_meta


@pytest.mark.parametrize("tied", [True, False])
def test_of_a_qwen3_5_that_reads_images_the_part_for_texts_is_read(tmp_path: Path, tied: bool) -> None:
    """As Transformers' own class for causal language models reads it; it is written as that part alone."""
    seeing = {"hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
    texts = {**COMMON, **RECURRENT["qwen3_5_text"], "tie_word_embeddings": tied}
    config = AutoConfig.for_model(
        "qwen3_5", text_config=texts, vision_config={**seeing, "num_position_embeddings": 16}, tie_word_embeddings=tied
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        module = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
        for param in module.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)
    module.save_pretrained(tmp_path / "seeing")
    tiny_tokenizer().save_pretrained(tmp_path / "seeing")
    model = load_model(str(tmp_path / "seeing"), dtype="float32")
    prompt, response = [5, 6, 7, 8], [9, 10, 11]
    got, _ = model.logprobs(pack([(prompt, [response])]), 1.0)
    logits_TV = module(input_ids=torch.tensor([[*prompt, *response]])).logits[0]
    expected = logits_TV.log_softmax(-1)[3:-1].gather(1, torch.tensor(response)[:, None])[:, 0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    save_pretrained(model, tmp_path / "texts")
    assert json.loads((tmp_path / "texts/config.json").read_text())["model_type"] == "qwen3_5_text"
    again = load_model(str(tmp_path / "texts"), dtype="float32")
    assert torch.equal(again.weights, model.weights)
