"""Compiled kernels: loops over arrays whose numbers stay in registers; and the noise of draws, which one of them adds.

* On a CPU, by numba: `decoder` (all layers of a dense model) is made of `products`, `paged_attention` and
  `matrix_attention` (with `scores`, asked by a `paged_call`); `draw` draws with `noise` (`noise_bits`), `fused_rows` is
  for training (`logprob_kernels` its interface), `draft_lookup` finds known texts, `draft_choice` chooses among drafts.
* `*_intrinsics` stand for single instructions: scalars, vectors of AVX-512 or AVX2, the matrix unit AMX.
* On a GPU, by Triton: `device_*`, each with its programs in `device_*_kernels`; `on_devices` says whether they compile.

Enter: arrays, addresses, sizes. Leave: arrays; a kernel knows no model, engine or pool. Each has a plain twin that says
what it computes, in the package that calls it or in its tests. Without numba, or Triton, they are absent, and
`AVAILABLE` says so. May import `compiled` and nothing else of plait.
"""
