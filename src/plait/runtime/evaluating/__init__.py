"""What a model says to prompts, and nothing learns from it: evaluations, `plait generate`, an engine's gate.

* `measure` says what an evaluation measures, `answering` answers and scores held-out prompts, `parts` are the means of
  each reward, `evaluation` is the result of a set, `evaluations` that of all.
* `generate_job` checks what `plait generate` asks, `generate` answers it, `generation_report` says how fast.
* `engine_gate` compares another engine's log-probs with the trainer's before the first step.
"""
