"""The executor with a virtual clock and a memory ledger: it runs what the runtime runs.

* `static`: fixed lists of actions (pipelines, rings, transfers), on several lanes per rank.
* `engine`: a generation engine without tensors.
* `rollout`: engines on a clock, and what is decided on the way: continuous batching, migration, scoring beside
  generation, by the same policies as the engines.

Enters: schedules or requests, and step times as functions. Leaves: a predicted `Timeline`. No torch, no clock.
"""
