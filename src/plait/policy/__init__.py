"""Pure decisions: how a batch is drawn, packed and split. Numbers in, decisions out; the runtime and the simulator
call the same functions. Imports no torch, reads no clock and no memory.

* What a step of generation computes: `step` in one vocabulary, `batching` decides, of `sequences` with `room` in
  `blocks`; `coming_back`, `kept_turns` and `prompts_alone` are samples and prompts of special kinds. `shares` and
  `decode_ring` keep the stages of a model busy, `turns` orders the works of a rank.
* What moves in a rollout: `threshold` and `fusion_gate` say when the last samples are gathered (`tuning` by earlier
  lengths), `migration` where; `rebalance` shares samples out, of `unfinished` ones at a `decode_pace`; `prompt_pace`
  deals prompts that are computed elsewhere. `early_scores` and `score_parts` say what is scored before a rollout has
  ended.
* `packing`: mini-batches and micro-batches.
"""
