"""The vocabulary of execution: what is done, in which order, and what happened.

* `action`: the smallest thing scheduled, with a text form that parses back (`actor:2F0`).
* `schedule`: ordered actions of each rank, their file form; `validate` says why one cannot run.
* `pipeline`: models cut into stages on ranks, one or two at a time; `generators` makes schedules of them by rule
  (GPipe, 1F1B). Searches for better ones are in `planner`.
* `plan`: what a run is told to do: placements, schedules, policies and the predicted timeline under one name;
  `named_plans` makes those that have names, `completion` completes one and checks it against the flow, `placements` is
  what one role needs of it, `kept_pools` where memory of generation stays.
* `training_order`: the order in which a role trains through its stages, by a rule or as a plan states it (`stated`);
  `fused`, `joint_training`: several roles that train together by one order; `stage_fusion`: scoring on ranks that still
  generate, `fusion_times` what its rules ask of a machine; `fusion_rule` and `update_rule` are what a recipe asks.
* `work`: what a rank does an action at a time; `dispatch`: which work goes on next; `needs` and `open_steps`: which
  calls wait for which, and which steps run beside each other; `teams`: which ranks talk to each other.
* `timeline`: actions with start, end and bytes, predicted or measured; `compare` holds two against each other, `idle`
  says what ranks waited for, `busy` what they were busy with, by call and by kind of action, `gantt` draws one.

Enters: numbers, a dataflow. Leaves: records. Imports `dataflow`, `layout` and what lies below them; no torch.
"""
