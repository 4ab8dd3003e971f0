"""What the runtime runs, in simulated seconds and with a memory ledger.

* `static`: fixed lists of actions (pipelines, rings, transfers), on several lanes per rank.
* `engine`: a generation engine without tensors.
* `clock`: with it, `schedule.dispatch` drives a prediction as it drives a run.
* `rollout`: engines under that dispatcher, and what is decided on the way: continuous batching, migration, scoring
  beside generation, by the same policies as the engines.
* `steps`: whole steps of a plan under that dispatcher, from what `costs` says of each call; `step_graph` is who waits
  for whom, `places` where each call runs, `step_weights` and `step_memory` who holds what, `step_program` plays them.

Enters: schedules or requests, and step times as functions. Leaves: a predicted `Timeline`. No torch, no clock.
"""
