"""Checkpoints on disk: found, fetched, checked, read and written.

* Found: `hub` finds a folder by name, `checkpoint_folder` and `adapter_folder` look at it, `gguf_checkpoint` makes one
  of a GGUF file; `known_shapes` are models without weights.
* Checked: `claims` of small files against each other and the tensors, `finite` weights.
* Read: `checkpoint_files` by block, through the `conversion` that Transformers applies; `pretrained` calls
  Transformers.
* Written: `saving` a folder, whole or not at all, by `tensor_file`.
"""
