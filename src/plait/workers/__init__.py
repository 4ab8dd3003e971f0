"""The group of workers that runs the calls of a flow: what each holds, and what the leader tells the others.

* What a rank holds: `rank_state` its models, engines and optimizer states, made by `role_builder` of models from
  `loading` (`vllm_engines` opens vLLM); `offload_manager` moves them off the device and back, `peak_memory` counts.
  `ranks` is what all know of each other.
* What the leader tells ranks, a record each: `score_call`, `train_calls`, `upkeep`, `knowledge_upkeep`,
  `call_messages`; `commands` has all by their kinds. As bytes: `wire_forms`, `messages`, `row_stubs`, `drawn_texts`,
  `packed_experts`, `packed_supports`, by `transport`.
* The leader: `announcer` tells, `freshness` knows which copies of weights are current, `worker_group` is the group as
  the main loop sees it, with `remote_engine` (`dealing`, `gathering`, `remote_moves`, `remote_prompts`) and
  `remote_trainer`. `follower` is the loop of every other rank.
* Generation on ranks: `instances` and `lockstep_engine` step together, over `step_links`. Samples change instance:
  `staged_move` as the leader sees it; `migrations`, `prompt_moves`, `sample_mover`, `sample_ends` and `sample_offers`
  on ranks, `background_move` beside other work.
* Kept with a checkpoint: `checkpoint_parts`, `optimizer_state` and `rank_optimizers`, `draft_knowledge`.
* What was done: `recorder` advances any work and records it, `clock` is the one of a run, `status_file` shows progress.

A group of one has the same leader and no followers.
"""
