"""Training and scoring of one role: micro-batches forward and backward, the optimizer step. The loss is passed in.

Enters: a model, rows with columns, a loss function. Leaves: log-probs, updated weights, metrics; step by step, as
generators, so that a worker decides what runs next. `settings` and `memory` import no torch.
"""
