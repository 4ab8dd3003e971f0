"""The group of workers that runs the calls of a flow: what each holds, and what the leader tells the others.

* `rank_state`: the models, engines and optimizer states of one rank; `role_builder` makes them, `offload_manager` moves
  them off the device and back, `optimizer_state` writes and reads them.
* `score_call`, `train_calls`, `upkeep`, `call_messages`: what the leader tells ranks, a record each, with a rank's part
  of it; `commands` has all by their kinds. `wire_forms`, `messages`, `row_stubs`, `transport`: the same as bytes.
* `announcer`: the leader's word to all ranks, itself among them; `freshness`: which copies of weights are as they
  should be. `worker_group`, `remote_engine` and `remote_trainer` are the group as the leader sees
  it; `follower` is the loop of every other rank.
* `lockstep_engine`: ranks that generate together. `sample_mover`, `sample_ends`, `sample_offers`: samples that
  change instance.
* `recorder`: goes on with any work and writes down what was done; `status_file` says it to who watches.
* `peak_memory`: the most that a rank has held.

A group of one has the same leader and no followers.
"""
