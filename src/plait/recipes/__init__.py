"""Recipes: their keys, files and stages, the algorithms that they name, and what is wrong in them.

* `recipe` has all keys, `recipe_file` reads a file with overrides, `stages` one of several runs. `keys` are the types
  of keys, `open_keys` those that a run on GPUs may fill in, `evaluation_settings` and `role_settings` are sections;
  `evaluation_sets` says what a run is measured on.
* `algorithm` finds and traces a flow, `role_models` says which model each role begins as, `generated_ahead` what a step
  does for later batches, `plan_files` which plan is meant.
* Unknown keys are answered by `other_names` (of other systems), `usual_names` and `renamed_keys` (of earlier versions).
* What is wrong is found by `checks`, for a subject each: `length_limits`, `flow_checks`, `device_checks`,
  `engine_checks`, `recurrent_checks`, `reward_checks`, `router_checks`, `staleness_checks`, `token_checks`,
  `turn_checks`. `trust` says whose code may run.
"""
