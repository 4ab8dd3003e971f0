"""Drawing samples: requests enter, finished samples leave, each as soon as it ends.

`request` and `settings` say what is asked for, `engine` is the steppable loop, `response` a sample in the making.
`pool` holds keys and values in blocks, `rows` and `ragged` make a step's batch of them, `forward` computes it by a
`backend`: `module_forward` with `paged` attention, or `compiled_forward`; or in `exact` mode. `sampler` makes tokens of
logits, `speculator` drafts of what is known and of what `model_drafter` proposes, `stopping` finds stop strings,
`transfer` lets a sample go on elsewhere. Decisions about who runs when are in `policy.batching`. May import models,
kernels, data and what lies below them; never training or runtime. `settings` imports no torch.
"""
