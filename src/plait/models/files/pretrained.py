"""Reading checkpoint folders with Transformers: the one place that calls its auto classes.

A checkpoint is data, never a program. Code that one brings along (`auto_map`) is not run, nor is anybody asked whether
it should be: where Transformers has a class of its own for the family, that is taken, else the checkpoint is refused.
Kernels that a configuration names on the hub are not fetched either.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plait.errors import ModelError

_DATA_ONLY = {"trust_remote_code": False}
_VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tekken.json")
_NO_VOCABULARY = (
    "its folder has no vocabulary (`tokenizer.json` or the like), and without one no text can be read; copy the files "
    "of the tokenizer into it"
)


def tokenizer_of(folder: Path, name: str) -> Any:
    """The tokenizer in a checkpoint's folder.

    Args:
        name: of the model, for messages; so below.

    Raises:
        ModelError: it needs code of its own, or is damaged. OSError, ValueError: it cannot be read.
    """
    from transformers import AutoTokenizer

    with _code_refused(folder, name, "tokenizer"):
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **_DATA_ONLY)
            tokenizer("a")
            _check_vocabulary(tokenizer)
        except (OSError, ValueError) as error:
            if not any(path for pattern in _VOCABULARIES for path in folder.glob(pattern)):
                raise ValueError(_NO_VOCABULARY) from error  # Transformers says of what it would make one
            raise
        except Exception as error:  # of the library `tokenizers`, which raises no class of its own, and of Transformers
            raise ModelError(
                f"model: the tokenizer of {name!r} cannot be read: {type(error).__name__}: {str(error)[:300]}; fetch "
                "or copy its files again, or set `model` to another"
            ) from error
        return tokenizer


def _check_vocabulary(tokenizer: Any) -> None:
    """Where a folder has no files of a tokenizer, Transformers may put one of the family's special tokens alone, for
    which every text is empty or one unknown token.

    Raises:
        ValueError: that is so.
    """
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.added_tokens_decoder):
        raise ValueError(_NO_VOCABULARY)


def config_of(folder: Path, name: str) -> Any:
    """The configuration in a checkpoint's folder. Weights that are stored in fewer bits are to be read as the numbers
    that they stand for: on a GPU Transformers would keep them as they are. Raises as `tokenizer_of`."""
    from transformers import AutoConfig

    with _code_refused(folder, name, "configuration"):
        config = without_kernels(AutoConfig.from_pretrained(folder, **_DATA_ONLY))
    if quantised := getattr(config, "quantization_config", None):
        config.quantization_config = {**quantised, "dequantize": True}
    return config


def generation_of(folder: Path | None) -> Any:
    """The generation configuration in a checkpoint's folder, where chat models add end tokens; None without one."""
    from transformers import GenerationConfig

    if folder is None or not (folder / "generation_config.json").exists():
        return None
    return GenerationConfig.from_pretrained(folder)


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """What Transformers raises becomes a ModelError; no random state is moved, no bar is shown."""
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    from plait.models.files.saving import without_progress_bars

    with torch.random.fork_rng(devices=[]), without_progress_bars():
        try:
            yield
        except (
            OSError,
            ArithmeticError,
            AssertionError,
            AttributeError,
            ImportError,
            LookupError,
            TypeError,
            ValueError,
            RuntimeError,
            SafetensorError,
            StrictDataclassError,
        ) as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"model: {name!r} cannot be read as a causal language model: {error}") from error


def module_of(folder: Path, name: str, dtype: Any, *, decoder_only: bool) -> tuple[Any, dict[str, Any]]:
    """The weights in a checkpoint's folder, as a module, and Transformers' report about them.

    Args:
        decoder_only: without the head of a causal language model.

    Raises:
        ModelError: it needs code of its own. OSError and others of Transformers: it cannot be read.
    """
    config = config_of(folder, name)
    with _code_refused(folder, name, "model"):
        return _auto_class(decoder_only).from_pretrained(
            folder, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **_DATA_ONLY
        )


def new_module(config: Any, dtype: Any = None, *, decoder_only: bool) -> Any:
    """A module of a configuration, its weights freshly drawn, in full numbers however the checkpoint stores them."""
    options = {} if dtype is None else {"dtype": dtype}
    config = copy.copy(without_kernels(config))
    vars(config).pop("quantization_config", None)
    return _auto_class(decoder_only).from_config(config, **options, **_DATA_ONLY)


def without_kernels(config: Any) -> Any:
    """The configuration, without the names of kernels that would be fetched and run when its module is made."""
    for section in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        stated = getattr(section, "_attn_implementation", None)
        if stated is not None and ("/" in str(stated) or "flash" in str(stated)):
            section._attn_implementation = None  # ours is set later
    return config


def needs_code(read: Mapping[str, Any]) -> bool:
    """Whether a `config.json` or `tokenizer_config.json` names code that comes with the checkpoint."""
    return bool(read.get("auto_map"))


def code_refusal(name: str, what: str) -> ModelError:
    return ModelError(
        f"model: {name!r} comes with code of its own for its {what} (`auto_map`), which plait does not run: a "
        "checkpoint is data. Set `model` to one whose family and tokenizer Transformers knows"
    )


def _auto_class(decoder_only: bool) -> Any:
    from transformers import AutoModel, AutoModelForCausalLM

    return AutoModel if decoder_only else AutoModelForCausalLM


@contextlib.contextmanager
def _code_refused(folder: Path, name: str, what: str) -> Iterator[None]:
    """Transformers' advice, to trust the code, becomes our reason."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise code_refusal(name, what) from error
