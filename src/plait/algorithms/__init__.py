"""Algorithms, one file each: the flow, the advantage and the loss as pure functions, and their options.

* Policies: `grpo`, `rloo`, `reinforce_pp`, `remax`, and with a `critic` `ppo` and `safe_rlhf`; `policy` and `groups`
  are what they share, `advantages`, `kl`, `correction`, `surrogates` and `losses` are their parts.
* Given samples: `sft`, `reward_model`, `dpo`, `kto`; `distill` learns from a teacher. `options` are keys of several.

Importable without torch: advantages are NumPy, losses use the methods of the tensors that they are given.
"""
