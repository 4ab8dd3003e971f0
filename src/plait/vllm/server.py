"""vLLM's side: a launched worker that holds vLLM's engine in its own process, and steps it when it is told to.

Runs in vLLM's environment. Only vLLM's public interface is used; the engine, its scheduler and its worker are all in
this process, so that which samples are computed together follows from the requests alone, and nothing outlives it.
"""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plait.launch.worker_context import WorkerContext
from plait.vllm.messages import Ended, Key, Loading, StoredWeights, Wanted

STEPS_AT_ONCE = 8
"""That are computed before it says how it goes, where no sample ends."""
ENVIRONMENT = {
    "PYTHONPATH": "",  # the packages of plait's environment are none of this one's
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Variables of the process."""


class VllmServer:
    """Constructed with the model's folder; holds random weights until `update_weights`."""

    def __init__(self, context: WorkerContext, loading: Loading) -> None:
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over `kv_bytes`
        for variable in ("NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):  # for the next run; read when they are imported
            os.environ.setdefault(variable, os.path.join(sys.prefix, "plait-kernels"))
        from vllm import EngineArgs, LLMEngine

        self._folder = loading.folder
        self._open: dict[str, Wanted] = {}
        """By vLLM's name of the request."""
        self._tokenizer: Any = None
        self._sleeps = _can_sleep()
        self._is_asleep = False
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=loading.folder,
                dtype=loading.dtype,
                load_format="dummy",  # the trainer's weights come before the first sample
                skip_tokenizer_init=True,
                generation_config="vllm",
                max_model_len=loading.max_tokens,
                max_num_seqs=loading.max_running,
                max_num_batched_tokens=max(loading.max_prefill_tokens, loading.max_running),
                kv_cache_memory_bytes=loading.kv_bytes,
                enable_prefix_caching=True,
                async_scheduling=False,
                # On a CPU weights are packed when they are loaded. A compiled graph would keep those that it was made
                # with, and so would a head that shares the embedding's, which has no weights of its own to load.
                enforce_eager=loading.device == "cpu",
                hf_overrides=_overrides(loading),
                enable_sleep_mode=self._sleeps,
                logits_processors=["plait.vllm.keyed_noise:KeyedNoise"],
                logprobs_mode="processed_logits",
                disable_log_stats=True,
                seed=0,
            )
        )

    def update_weights(self, stored: StoredWeights) -> str:
        """Load these weights, by their names in Transformers; the hash of what was read."""
        from plait.vllm.shared_weights import SharedReader

        self._wake()
        reader = SharedReader(stored)
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(reader)})
        return reader.digest()

    def step(self, wanted: Sequence[Wanted]) -> list[Ended]:
        """Take in further samples; then compute steps until one ends, or for a while; those that have ended."""
        self._wake()
        for sample in wanted:
            self._add(sample)
        ended: list[Ended] = []
        for _ in range(STEPS_AT_ONCE):
            if ended or not self._open:
                break
            for output in self._engine.step():
                if (sample := self._open.get(output.request_id)) is not None:
                    ended += self._after(output.request_id, sample, output)
        return ended

    def forget(self) -> None:
        """Nobody waits for the samples any longer. Raises RuntimeError as `rest`."""
        self._engine.abort_request(list(self._open))
        self._open.clear()
        self.rest()

    def rest(self) -> None:
        """All that was asked for has ended: keys and values are forgotten, so that what comes next does not depend on
        what was before; and where vLLM can, it leaves the device to others.

        Raises:
            RuntimeError: vLLM holds on to what has ended.
        """
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM holds keys and values of samples that have ended")
        if self._sleeps and not self._is_asleep:
            self._engine.sleep(1)
            self._is_asleep = True

    def _wake(self) -> None:
        if self._is_asleep:
            self._engine.wake_up()
            self._is_asleep = False

    def _add(self, wanted: Wanted) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,  # the most probable of what `KeyedNoise` leaves, which is the token that it drew
            max_tokens=wanted.limit - len(wanted.begun_ids),
            stop_token_ids=list(wanted.stop_token_ids),
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE if wanted.stop else RequestOutputKind.FINAL_ONLY,
            extra_args={
                "noise_key": wanted.noise_key,
                "temperature": wanted.temperature,
                "greedy_logprobs_at": wanted.greedy_logprobs_at,
                "top_k": wanted.top_k,
                "top_p": wanted.top_p,
                "num_begun": len(wanted.begun_ids),
            },
        )
        name = _name(wanted.key)
        self._engine.add_request(name, {"prompt_token_ids": [*wanted.prompt_ids, *wanted.begun_ids]}, params)
        self._open[name] = wanted

    def _after(self, name: str, wanted: Wanted, output: Any) -> list[Ended]:
        """The sample, where it has ended."""
        from plait.generation.stopping import completes_stop

        (completion,) = output.outputs
        token_ids = tuple(completion.token_ids)
        stopped = completion.finish_reason == "stop"
        if not stopped and wanted.stop:
            response = (*wanted.begun_ids, *token_ids)
            stopped = completes_stop(self._texts(), response, wanted.stop, wanted.turn_start)
            if stopped and not output.finished:
                self._engine.abort_request([name])
        if not (stopped or output.finished):
            return []
        del self._open[name]
        return [Ended(wanted.key, token_ids, tuple(completion.logprobs.logprobs), stopped)]

    def _texts(self) -> Any:
        """The model's tokenizer, read when it is first needed."""
        if self._tokenizer is None:
            from plait.models.files.pretrained import tokenizer_of

            self._tokenizer = tokenizer_of(Path(self._folder), self._folder)
        return self._tokenizer


def _overrides(loading: Loading) -> dict[str, Any]:
    """What the model's configuration is to say in place of what it says."""
    from plait.models.files.claims import read_configuration

    overrides: dict[str, Any] = {"tie_word_embeddings": False} if loading.device == "cpu" else {}
    if read_configuration(Path(loading.folder) / "config.json").get("quantization_config"):
        overrides["quantization_config"] = None  # the trainer's weights are full numbers, whatever the checkpoint's are
    return overrides


def _can_sleep() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_sleep_mode_available())


def _name(key: Key) -> str:
    return f"{key[0]}.{key[1]}"
