"""Compiled kernels: loops over arrays whose numbers stay in registers; and the noise of draws, which one of them adds.

Enter: arrays, addresses, sizes. Leave: arrays; a kernel knows no model, engine or pool. `*_intrinsics` stand for single
instructions (scalars, vectors of AVX-512 or AVX2, the matrix unit AMX), the others are made of them: `paged_attention`
(with `scores` and `matrix_attention`), `products`, `decoder` (all layers of a dense model), `draw`, `fused_rows` of
training, and `draft_lookup` (known texts); `device_*` are those of GPUs, which Triton compiles. Each has a plain twin
that says what it computes, in the package that calls it or in its tests. Without numba, or Triton, they are absent, and
`AVAILABLE` says so. May import `compiled` and nothing else of plait.
"""
