"""What a run will take: plans found and predicted, what a machine takes, and afterwards how wrong that was.

* Plans: `planning` predicts a plan and finds one, `run_planning` for a run on its machine; `choosing` takes the best of
  a search, `search_facts` is what a search knows of roles, `fusing` finds the order of roles that train together.
  `kept_plans` finds the plan of an earlier stay.
* What is known: `machine` measures or looks up devices, `network` the links between nodes, `lengths` the lengths of
  texts, `draft_forecast` what drafts bring; `predictable` is what a prediction asks of a run.
* Memory: `room` compares plan and devices, `misfit` says why nothing fits, `remedies` what would help, `spending` how a
  run uses the memory that is left, `disk_room` the disk.
* Afterwards: `forecast` holds prediction and measurement side by side, `refinement` corrects the next prediction.
"""
