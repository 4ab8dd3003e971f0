"""What the runtime runs, in simulated seconds and with a memory ledger.

* `static`: fixed lists of actions (pipelines, rings, transfers), on several lanes per rank.
* `clock`: with it, `schedule.dispatch` drives a prediction as it drives a run.
* `steps`: whole steps of a plan under that dispatcher, from what `costs` says of each call; `step_graph` is who waits
  for whom, `places` where each call runs, `step_weights` and `step_memory` who holds what, with `step_connections`;
  `step_follows` moves references that follow, `joint_orders` prices roles that train together; `step_order` is the
  order of calls, `step_program` plays them, `step_simulator` all of it, over `atoms` of ranks that are alike; `tails`
  says how a generation ends whose ranks score.

Enters: schedules or plans, and what their parts take. Leaves: a predicted `Timeline`. No torch, no clock.
"""
