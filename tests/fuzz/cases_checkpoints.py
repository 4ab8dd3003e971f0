"""Checkpoint folders: each of their files damaged, and files that contradict each other."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

from tests.fuzz.frame import ACCEPTED, ANSWERED, Case, Expected, Place, refused

DEEP = "[" * 100_000 + "]" * 100_000
BROKEN: dict[str, str | bytes] = {
    "empty": "",
    "no JSON": "hello",
    "a list": "[1, 2]",
    "a number": "3",
    "null": "null",
    "cut": '{"a": ',
    "deep": '{"a": ' + DEEP + "}",
    "deep and open": "[" * 100_000,
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "NULs": b"\0" * 64,
    "a key twice": '{"a": 1, "a": 2}',
    "thousands of digits": '{"a": ' + "9" * 6000 + "}",
}

CONFIG: dict[str, dict[str, Any]] = {
    "fewer layers": {"num_hidden_layers": 1},
    "more layers": {"num_hidden_layers": 3},
    "no layers": {"num_hidden_layers": 0},
    "minus one layer": {"num_hidden_layers": -1},
    "many layers": {"num_hidden_layers": 10**9},
    "layers true": {"num_hidden_layers": True},
    "layers a text": {"num_hidden_layers": "2"},
    "half a layer": {"num_hidden_layers": 2.5},
    "layers a list": {"num_hidden_layers": [2]},
    "a smaller vocabulary": {"vocab_size": 300},
    "a larger vocabulary": {"vocab_size": 400},
    "a vocabulary without end": {"vocab_size": 10**15},
    "a vocabulary of nothing": {"vocab_size": 0},
    "another width": {"hidden_size": 64},
    "a width without end": {"hidden_size": 10**12},
    "a width that is odd": {"hidden_size": 33},
    "heads that do not fit": {"num_attention_heads": 3},
    "more heads for keys": {"num_key_value_heads": 8},
    "no heads": {"num_attention_heads": 0},
    "a text for heads": {"num_attention_heads": "four"},
    "another head": {"head_dim": 16},
    "another inner width": {"intermediate_size": 96},
    "no positions": {"max_position_embeddings": 0},
    "positions a text": {"max_position_embeddings": "many"},
    "positions beyond all": {"max_position_embeddings": 10**18},
    "an end beyond the vocabulary": {"eos_token_id": 320},
    "an end below": {"eos_token_id": -2},
    "an end that is a text": {"eos_token_id": "</s>"},
    "ends that are texts": {"eos_token_id": ["a", "b"]},
    "an end that is true": {"eos_token_id": True},
    "a family that nobody knows": {"model_type": "unheard_of"},
    "a family that is a number": {"model_type": 3},
    "a family that is a list": {"model_type": ["llama"]},
    "no family": {"model_type": None},
    "another family": {"model_type": "gpt2"},
    "a family without a decoder": {"model_type": "bert"},
    "code of its own": {"auto_map": {"AutoModelForCausalLM": "x.Y"}, "model_type": "unheard_of"},
    "an unknown activation": {"hidden_act": "nothing"},
    "a rope that is a text": {"rope_scaling": "abc", "rope_parameters": "abc"},
    "a rope of an unknown kind": {"rope_parameters": {"rope_type": "abc", "rope_theta": 1.0}},
    "architectures a number": {"architectures": 3},
    "layer types that are too few": {"layer_types": ["full_attention"]},
    "layer types of another kind": {"layer_types": ["linear_attention", "full_attention"]},
    "layer types that are numbers": {"layer_types": [1, 2]},
    "a text model that is a text": {"text_config": "abc"},
    "a text model that is empty": {"text_config": {}},
}
"""Changes of config.json that a checkpoint must not survive (see ANY for those it may)."""

ANY = frozenset(
    {
        "an end that is a text",
        "another family",
        "architectures a number",
        "a text model that is empty",
        "a text model that is a text",
        "a rope that is a text",
        "layer types that are too few",
        "another head",
        "another inner width",
        "heads that do not fit",
        "more layers",
        "positions beyond all",
    }
)
"""Found when the weights are read, or not at all."""
LATE = frozenset(
    {"an unknown activation", "a rope of an unknown kind", "a family without a decoder", "layer types of another kind"}
)
"""Found when the model is made."""

TEMPLATES: dict[str, str] = {
    "without end": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "exponential": "{% set ns = namespace(s='ab') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
    "{{ ns.s }}",
    "a range too large": "{% for a in range(10 ** 12) %}{% endfor %}",
    "a long text": "{{ 'a' * 30000000 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "division by nothing": "{{ 1 / 0 }}",
    "a syntax error": "{% for %}",
    "an unknown filter": "{{ messages | nonsense }}",
    "a raise": "{{ raise_exception('no system message') }}",
    "forbidden": "{{ ''.__class__.__mro__ }}",
    "an attribute of nothing": "{{ nothing.a.b }}",
    "a number plus a text": "{{ 1 + 'a' }}",
    "import": "{% import 'os' as os %}",
    "nothing": "",
}

_CHAT = {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}


def cases() -> Iterator[Case]:
    for file in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        for what, content in BROKEN.items():
            expected = refused()
            if (file, what) in (("tokenizer.json", "a key twice"), ("tokenizer.json", "thousands of digits")):
                expected = refused("tokenizer")
            yield Case(f"{file}: {what}", expected, _with(**{file.replace(".", "__"): content}))
            if what in ("deep", "no JSON", "a list"):
                yield Case(f"generate: {file}: {what}", expected, _generate(**{file.replace(".", "__"): content}))
    for what, content in BROKEN.items():
        if what != "empty":
            yield Case(
                f"an index: {what}", refused(), _with(model__safetensors__index__json=content, model__safetensors=None)
            )
    for what, change in CONFIG.items():
        expected: Expected = ANSWERED if what in ANY | LATE else refused()
        yield Case(f"config: {what}", expected, _with(config__json=_changed(change)), always=what == "fewer layers")
        if what not in ("an end that is a text",) and what not in ANY:
            yield Case(f"generate: config: {what}", refused(), _generate(config__json=_changed(change)))
    yield from _of_tensors()
    yield from _of_tokenizers()
    for what, template in TEMPLATES.items():
        slow = what in ("without end", "exponential")
        yield Case(f"template: {what}", refused(), _template(template), always=slow and what == "without end")
    for seed in range(40):
        yield Case(f"config: bytes changed, {seed}", ANSWERED, _with(config__json=_noise(seed)))
        yield Case(f"header: bytes changed, {seed}", ANSWERED, _with(model__safetensors=_noise(seed, 2000)))
        yield Case(f"tokenizer: bytes changed, {seed}", ANSWERED, _with(tokenizer__json=_noise(seed)))
    yield from _accepted()


def _with(**files: Any) -> Callable[[Place], list[str]]:
    return lambda place: place.recipe(model=place.checkpoint(**files))


def _generate(**files: Any) -> Callable[[Place], list[str]]:
    return lambda place: place.generate(model=place.checkpoint(**files))


def _template(template: str) -> Callable[[Place], list[str]]:
    def argv(place: Place) -> list[str]:
        from pathlib import Path

        rows = Path(place.rows(_CHAT, _CHAT))
        model = place.checkpoint(chat_template__jinja=template)
        return place.recipe(model=model, data__source=rows)

    return argv


def _changed(change: dict[str, Any]) -> Callable[[bytes], bytes]:
    def of(whole: bytes) -> bytes:
        held = json.loads(whole) | change
        return json.dumps(
            {key: value for key, value in held.items() if value is not None or key not in change}
        ).encode()

    return of


def _noise(seed: int, span: int | None = None) -> Callable[[bytes], bytes]:
    def of(whole: bytes) -> bytes:
        draw, changed = random.Random(seed), bytearray(whole)
        for _ in range(draw.choice((1, 2, 6))):
            changed[draw.randrange(min(span or len(changed), len(changed)))] = draw.randrange(256)
        return bytes(changed)

    return of


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def of(whole: bytes) -> bytes:
        length = int.from_bytes(whole[:8], "little")
        text = json.dumps(change(json.loads(whole[8 : 8 + length]))).encode()
        return struct.pack("<Q", len(text)) + text + whole[8 + length :]

    return of


def _entry(**change: Any) -> Callable[[bytes], bytes]:
    def of(header: dict[str, Any]) -> dict[str, Any]:
        name = next(key for key in header if key != "__metadata__")
        return header | {name: header[name] | change}

    return _header(of)


def _of_tensors() -> Iterator[Case]:
    changes: dict[str, Any] = {
        "empty": b"",
        "short": b"abc",
        "a length beyond the file": lambda whole: struct.pack("<Q", 2**40) + whole[8:],
        "a length beyond all": lambda whole: b"\xff" * 8 + whole[8:],
        "no length": lambda whole: b"\0" * 8 + whole[8:],
        "a header of noise": lambda whole: whole[:8] + random.Random(0).randbytes(400) + whole[408:],
        "cut": lambda whole: whole[:-100],
        "more behind": lambda whole: whole + b"abc",
        "a header that is a list": _header(lambda header: [1]),
        "a header that is deep": lambda whole: struct.pack("<Q", len(DEEP)) + DEEP.encode(),
        "an entry that is a number": _header(lambda header: header | {"x": 3}),
        "an entry without offsets": _header(lambda header: header | {"x": {"dtype": "F32", "shape": [1]}}),
        "offsets that are texts": _entry(data_offsets=["0", "4"]),
        "offsets before": _entry(data_offsets=[-4, 0]),
        "offsets beyond": _entry(data_offsets=[0, 2**62]),
        "offsets that cross": _entry(data_offsets=[8, 4]),
        "a dtype that is none": _entry(dtype="F31"),
        "a dtype that is a number": _entry(dtype=3),
        "a shape that is a text": _entry(shape="abc"),
        "a shape below": _entry(shape=[-1, 2]),
        "a shape without end": _entry(shape=[2**40, 2**40]),
        "no tensors": _header(lambda header: {}),
    }
    late = {"a dtype that is none": refused(), "a shape without end": refused(), "no tensors": refused()}
    for what, change in changes.items():
        yield Case(f"tensors: {what}", ANSWERED if what in late else refused(), _with(model__safetensors=change))
        yield Case(f"generate: tensors: {what}", refused(), _generate(model__safetensors=change))
    pointing: dict[str, Any] = {
        "out of the folder": {"weight_map": {"a": "../tiny/model.safetensors"}},
        "to a file that is not there": {"weight_map": {"a": "none.safetensors"}},
        "to numbers": {"weight_map": {"a": 3}},
        "to a NUL": {"weight_map": {"a": "a\0b"}},
        "nowhere": {"weight_map": {}},
        "as a list": {"weight_map": ["a"]},
    }
    for what, index in pointing.items():
        alone = _with(model__safetensors__index__json=json.dumps(index), model__safetensors=None)
        yield Case(f"an index that points {what}", refused(), alone)


def _of_tokenizers() -> Iterator[Case]:
    settings: dict[str, dict[str, Any]] = {
        "a class that is none": {"tokenizer_class": "Nonsense"},
        "a class that is a number": {"tokenizer_class": 3},
        "an end that is a number": {"eos_token": 3},
        "an end that is a map": {"eos_token": {"a": 1}},
        "an end that is a list": {"eos_token": ["a"]},
        "a template that is a number": {"chat_template": 3},
        "a template that is a list": {"chat_template": [1]},
        "added tokens that are a text": {"added_tokens_decoder": "abc"},
        "added tokens with texts for ids": {"added_tokens_decoder": {"a": {"content": "x"}}},
        "added tokens of nothing": {"added_tokens_decoder": {"7": 3}},
        "a length that is a text": {"model_max_length": "abc"},
        "a length that is below": {"model_max_length": -1},
        "special tokens that are a number": {"extra_special_tokens": 3, "additional_special_tokens": 3},
    }
    for what, change in settings.items():
        yield Case(f"tokenizer settings: {what}", ANSWERED, _with(tokenizer_config__json=_changed(change)))
    parts: dict[str, dict[str, Any]] = {
        "no model": {"model": None},
        "a model that is a text": {"model": "abc"},
        "a model of an unknown kind": {"model": {"type": "Nonsense"}},
        "merges that are numbers": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [1]}},
        "merges of nothing": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}},
        "ids that are texts": {"model": {"type": "BPE", "vocab": {"a": "b"}, "merges": []}},
        "ids below": {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
        "ids beyond": {"model": {"type": "BPE", "vocab": {"a": 2**40}, "merges": []}},
        "an empty vocabulary": {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []},
        "added tokens that are a number": {"added_tokens": 3},
        "a decoder that is none": {"decoder": {"type": "Nonsense"}},
        "a version that is none": {"version": "99"},
    }
    for what, change in parts.items():
        yield Case(f"tokenizer: {what}", ANSWERED, _with(tokenizer__json=_changed(change)))

    def beyond(whole: bytes) -> bytes:
        held = json.loads(whole)
        held["model"]["vocab"]["1"] = 900
        return json.dumps(held).encode()

    yield Case("tokenizer: a token beyond the model's", refused("900"), _with(tokenizer__json=beyond), always=True)
    yield Case("generate: tokenizer: a token beyond", refused("900"), _generate(tokenizer__json=beyond))
    yield Case("no tokenizer", refused("tokenizer"), _with(tokenizer__json=None, tokenizer_config__json=None))


def _accepted() -> Iterator[Case]:
    yield Case("an untouched copy", ACCEPTED, _with(), always=True)
    yield Case("generate: an untouched copy", ACCEPTED, _generate(), compiles=True)
    yield Case("no generation config", ACCEPTED, _with(generation_config__json=None))
    yield Case("several ends", ACCEPTED, _with(generation_config__json='{"eos_token_id": [2, 1]}'))
    yield Case(
        "an end of the generation alone, beyond",
        refused("eos_token_id", "320"),
        _with(generation_config__json='{"eos_token_id": [2, 320]}'),
        always=True,
    )
    yield Case(
        "weights of another shape", Expected((1, 2)), _generate(config__json=_changed({"intermediate_size": 96}))
    )
    yield Case("weights that are too few", Expected((1, 2)), _generate(config__json=_changed({"num_hidden_layers": 3})))
