"""What a run will take, before anything is loaded: where each model goes, what it holds, and what leaves between calls.

* Plans: `placement` completes the plan of a run, `placed` is what its memory depends on, `rank_order` finds a better
  order of ranks, `aliasing` which layouts share memory, `offload_policy` what leaves a device, `share_checks` what goes
  with sharded weights.
* Seconds: `costs` is what a prediction asks, `model_costs` answers by formulas. `passes` are forwards and backwards
  (`role_passes`, `pipelines`, `layer_times`, `layer_kinds`), `optimizer_step`, `traffic` of collectives, `row_traffic`,
  `moves` of weights (`move_bound` from below), `sample_moves`, `fusion_times`. Generation: `generations` of a flow,
  `generating` one of them, or with prompts elsewhere `generating_apart` and `prompts_apart`; `instances`, `prefill`,
  `decoding`, `drafts`, `endings`, `captures`. `limit` is the least time on a machine.
* Memory: `device_memory` of each device, of `held_memory`, `held_parameters` and `role_memory` (what stays),
  `call_memory`, `forward_memory` and `working_memory` (what calls take); `generation_memory`, `generation_bytes`,
  `engine_memory`, `graph_memory`, `step_room`, `draft_memory`, `vllm_memory` of engines; `kept_sets`, `sample_sets` and
  `wide_columns` of samples; `connections` of NCCL. `spent_memory` spends what is left.
* Work: `workload` of a step (`flow_calls`, `call_lengths`, `lengths`, `shared_root`), in `micro_batch`es
  (`micro_batch_split`); `model_work` and `model_flops` of a model, with `experts`; `model_parameters`,
  `shape_parameters`, `estimate` of models that are not loaded.
* Machines: `cluster` of `hardware`, read from a `cluster_file` by `cluster_keys`; `machine` is this one, `gpu_links`
  its links. `measured` measures it for a `profile`; `kept_profiles` are on disk, `calibration` chooses one,
  `corrections` by earlier runs improve it.

Enters: a recipe, a dataflow, shapes, a cluster. Leaves: plans, bytes and seconds. Torch is imported in `measured`, and
where a function reads the parameters of a model (`placement`, `estimate`) or asks for GPUs (`placement`, `machine`).
"""
