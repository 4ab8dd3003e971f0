"""Checkpoints on disk: whole or absent, and exact.

`store` writes, reads and prunes them, `step_folders` lists them, `digests` knows their files by length and hash.

Enters: named tensors and a state of plain JSON values. Leaves: folders `step-N` of which the newest whole one is
found again after any crash. Imports `models.files.tensor_file` (the file format), `json_text` and `errors`.
"""
