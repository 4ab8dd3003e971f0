"""Drawing samples: requests enter, finished samples leave, each as soon as it ends.

`request` and `settings` say what is asked for, `engine` is the steppable loop, `cache` and `attention` hold and read
the keys and values, `sampler` and `noise` turn logits into tokens, `stopping` finds stop strings. Decisions about who
runs when are pure functions in `policy.batching`. May import models, data and what lies below them; never training or
runtime. `settings` imports no torch.
"""
