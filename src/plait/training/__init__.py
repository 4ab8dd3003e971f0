"""Training and scoring of one role: micro-batches forward and backward, the optimizer step. The loss is passed in.

* `trainer` is the engine of a role, `together` trains several roles in one schedule; `trainer_settings` and `settings`
  say how. `passes` go over micro-batches, through the `stages` of a `pipeline`.
* `mini_batch` is what an optimizer step sees, `micro_batches` its split, `loss_batch` what a loss gets of a
  micro-batch. `token_means` and `sequence_sums` are its means and sums, `loss_split` checks that a loss adds up,
  `tally` adds.
* `gradients` are summed, `optimizer` is AdamW over flat buffers; `memory` counts its bytes.
* `scored_rows` are what scoring brings, `results` what training reports, `rollout_check` whether engine and trainer
  agree. `router_balance` and `router_replay` are for mixtures of experts.

Enters: a model, rows with columns, a loss function. Leaves: log-probs, updated weights, metrics; step by step, as
generators, so that a worker decides what runs next. `settings` and `memory` import no torch.
"""
