"""A model over several ranks: teams and their collectives, stages, tensor parallelism, the part that a rank has.

* `team` is the ranks that hold a model, `peers` those along one axis, `transfer` a message between two; `nccl` holds
  the rules of NCCL, `reduce_scatter` sums into parts of any length.
* `partial` makes a rank's part of a model, `part_loading` reads it, `part` knows of the whole, `part_proof` shows that
  a family can be sharded, on a `scaled_down` model. `stage` is a pipeline stage.
* Tensor parallelism: `tensor_parallel` and `layer_hooks`, `collectives` for autograd, `mixers` of recurrent layers,
  `whole_experts` of mixtures, `adapters`; `partial_sums` are gradients that ranks have to add. Sequence parallelism:
  `token_split`, `kept_tokens`.
* Sharded weights (ZeRO-3): `gathered_layers` gathers a layer at a time, of `gathered_units`; `share_proof` shows that a
  family computes with that. `numbered` objects can be named to an operator of torch.
"""
