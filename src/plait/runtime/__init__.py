"""The main loop of a run and what surrounds it, in rooms; imports point down this list (`make lint`).

* `api` and `stage_runs` are what commands and programs call; `processes` are those of a run.
* `controller` is the main loop, `session` what it has open; `records` is what is written at each step, of numbers that
  `step_metrics` and `finished_step` put together. `prepare` reads and checks a recipe and finds its plan.
* `evaluating` asks for answers that nothing learns from; `health` is the doctor at work.
* `steps` runs a step of the traced graph: `executor` the graph, `calls` what each call does, `rollout` generation.
* `prediction` finds plans, predicts runs, and says afterwards how wrong it was.
* `inputs` is what a run is given; `folder` is what it leaves.
* `workers` is what the main loop asks of all that computes, `utilisation` how much of the devices it used; `stopping`
  and `process` are of this process.

Enters: a recipe. Leaves: a folder with metrics, samples, trace, checkpoints and the final model. May import every floor
below, the planner among them.
"""
