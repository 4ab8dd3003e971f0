"""A training step: the calls of a flow, what each does, and the roles that do it.

* `executor` runs a step, `calls` says what each call does, `step` holds what the calls have made. `batches` are the
  steps that are open, `graph_order` sorts what calls say, `between_steps` drives what runs between two steps.
* A rollout: `rollout` draws and rewards, `asking` asks the engine for samples, `engine_loop` steps the engine.
  `conversing` continues samples of several turns, `resampling` draws further prompts, `partial_rollout` and `drawn`
  keep what is not finished, `draft_knowledge` and `earlier_texts` what engines that draft have learned.
* The end of a rollout: `watch` looks at it, `rollout_moves` decides what moves; `tail` gathers the last samples
  (`gates` say when), `rebalancing` shares samples out.
* Scores: `rewarding` collects them, from functions (`reward_pools`, `function_reports`) and from models (`scorer`,
  `grading`). `scoring_parts` scores before a rollout has ended, `free_copies` on ranks that have no samples left.
* Functions of the flow: `host_calls`, and those that get the texts of a group, `sample_functions`, `prompting`.
* `opened_roles` opens the roles of a flow, `roles` is what fills them; `off_policy` says how old the samples are.
"""
