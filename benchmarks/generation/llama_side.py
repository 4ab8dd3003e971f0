"""llama.cpp through llama-cpp-python's low-level interface, in an environment of its own (setup_peers.sh).

One sequence per sample; the samples of a prompt share its cells; a sample that has ended leaves the batch at once. Its
own sampling takes one row at a time and sorts; NumPy's inverse of the distribution function is faster, and drawn here.
"""

from __future__ import annotations

import llama_cpp
import numpy as np

from generation.serving import Outcome, Runner, serve
from generation.workload import Case, Workload

PREFILL_TOKENS = 2048
"""Of one call; its default."""


class Batch:
    """llama.cpp's batch of (token, position, sequences, whether logits are wanted)."""

    def __init__(self, num_tokens: int) -> None:
        self._batch = llama_cpp.llama_batch_init(num_tokens, 0, 1)
        self._room = num_tokens

    def clear(self) -> None:
        self._batch.n_tokens = 0

    def add(self, token: int, position: int, sequence: int, *, logits: bool) -> None:
        at = self._batch.n_tokens
        assert at < self._room, "the batch is full"
        self._batch.token[at] = token
        self._batch.pos[at] = position
        self._batch.n_seq_id[at] = 1
        self._batch.seq_id[at][0] = sequence
        self._batch.logits[at] = logits
        self._batch.n_tokens = at + 1

    def decode(self, context: llama_cpp.llama_context_p) -> None:
        if (code := llama_cpp.llama_decode(context, self._batch)) != 0:
            raise RuntimeError(f"llama_decode: {code}")


def load(workload: Workload) -> tuple[Runner, str]:
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(workload.gguf.encode(), model_params)
    if not model:
        raise RuntimeError(f"llama.cpp does not load {workload.gguf}")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = -(-workload.max_samples * workload.max_tokens // 256) * 256
    params.n_batch = PREFILL_TOKENS
    params.n_seq_max = workload.max_samples
    params.n_threads = params.n_threads_batch = workload.threads
    params.kv_unified = True
    if workload.dtype == "float32":
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32  # else float16, its default
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp does not make a context of this size")
    memory = llama_cpp.llama_get_memory(context)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = Batch(PREFILL_TOKENS)

    def draw(random: np.random.Generator, places: list[int]) -> list[int]:
        """One token of the logits at each place of the last batch, at temperature 1."""
        rows = [llama_cpp.llama_get_logits_ith(context, place) for place in places]
        logits = np.stack([np.ctypeslib.as_array(row, shape=(vocabulary,)) for row in rows])
        logits -= logits.max(axis=1, keepdims=True)
        mass = np.cumsum(np.exp(logits, out=logits), axis=1)
        wanted = random.random(len(places), dtype=np.float32) * mass[:, -1]
        return [
            min(int(np.searchsorted(row, value, side="right")), vocabulary - 1)
            for row, value in zip(mass, wanted, strict=True)
        ]

    def prefill(case: Case, random: np.random.Generator) -> list[list[int]]:
        """All prompts, as many at a time as fit; the first token of each sample."""
        responses: list[list[int]] = []
        waiting: list[tuple[int, int]] = []
        batch.clear()
        used = 0

        def flush() -> None:
            if not waiting:
                return
            batch.decode(context)
            for place, group in waiting:
                first = len(responses)
                count = len(case.lengths[group])
                for sequence in range(first + 1, first + count):
                    llama_cpp.llama_memory_seq_cp(memory, first, sequence, -1, -1)
                responses.extend([token] for token in draw(random, [place] * count))
            waiting.clear()
            batch.clear()

        sequence = 0
        for group, prompt in enumerate(case.prompts):
            if used + len(prompt) > PREFILL_TOKENS:
                flush()
                used = 0
            for position, token in enumerate(prompt):
                batch.add(token, position, sequence, logits=position == len(prompt) - 1)
            used += len(prompt)
            waiting.append((used - 1, group))
            sequence += len(case.lengths[group])
        flush()
        return responses

    def run(case: Case, number: int) -> Outcome:
        random = np.random.default_rng(number)
        llama_cpp.llama_memory_clear(memory, True)
        responses = prefill(case, random)
        row_steps = 0
        while True:
            running = []
            for sequence, ((_, length), response) in enumerate(zip(case.samples, responses, strict=True)):
                if len(response) < length:
                    running.append(sequence)
                else:
                    llama_cpp.llama_memory_seq_rm(memory, sequence, -1, -1)
            if not running:
                return Outcome([len(response) for response in responses], row_steps)
            batch.clear()
            for sequence in running:
                prompt, response = case.samples[sequence][0], responses[sequence]
                batch.add(response[-1], len(prompt) + len(response) - 1, sequence, logits=True)
            batch.decode(context)
            row_steps += len(running)
            for sequence, token in zip(running, draw(random, list(range(len(running)))), strict=True):
                responses[sequence].append(token)

    return run, f"llama-cpp-python {llama_cpp.__version__}"


if __name__ == "__main__":
    serve(load)
