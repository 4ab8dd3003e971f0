"""The main loop of a run and what surrounds it: before it what is checked and planned, beside it the run's folder.

* `prepare` reads and checks a recipe (`prepared`, `reading`, `tokenizers`), `planning` and `fusing` find and foretell
  its plan (`run_planning`, `machine`, `network`, `lengths`), `roles` fills its roles (`filling`, `reward_pools`).
* `controller` is the main loop, `session` what it has open, `workers` what it asks of all that computes.
* `executor` runs a step of the traced graph, `calls` says what each call does: `rollout` generates (`running_on`,
  `rebalancing`, `tail`), `rewarding` and `scorer` score, `streams` and `free_copies` score in parts.
* `directory` is the run's folder (`run_files`, `claim`, `run_lock`, `history`, `stored_recipe`), `records` what is
  written there at each step, `forecast` the prediction beside what was measured.
* `evaluation` and `measure` ask held-out prompts; `doctor` looks at every step.
* `api`, `stage_runs`, `generate` and `export` are what commands and programs call; `processes` are those of a run.

Enters: a recipe. Leaves: a folder with metrics, samples, trace, checkpoints and the final model. May import every floor
below, the planner among them.
"""
