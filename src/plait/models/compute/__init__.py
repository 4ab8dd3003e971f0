"""Pieces of a forward and its backward over packed rows: attention, norms, rotations, products, log-probs.

* Attention: `attention` is the function that Transformers' layers call, `attention_form` how a layer weighs values,
  `visibility` what a token sees. `row_attention` chooses the way: `pieces` and `packed_attention` by matrix products,
  `flash_plan` and `flex_plan` by kernels of a GPU. `recurrent` layers compute by `segments`.
* Other layers: `layer_forms` recognises norms, gated MLPs and rotations; `layer_kernels` computes them on a GPU
  (`row_kernel_proof` shows that it is right), `rms_norm`, `gated_mlp` and `rope` on a CPU. `cpu_linear` and `widened`
  are products on a CPU, `float64` keeps a model in float64.
* The head: `logprobs` and `logprobs_at` in chunks (`head_chunks`), by the kernels that `head_kernels` chooses.
"""
