"""What a run will take, before anything is loaded: where each model goes, what it holds, and what leaves between calls.

* `placement`: the plan of a run, completed; `rank_order` says which device does what, so that least is moved.
* `device_memory`: what each device holds, of `estimate`, `generation_memory` and `working_memory`.
* `offload_policy`: what leaves a device between calls; `aliasing`: which layouts share memory.
* `limit`: the least time of generation on a machine.
* `costs`: what a prediction asks of a cost model; `model_costs` answers by formulas: `passes` (forwards, backwards and
  `pipelines`), `decoding` (generation), `traffic` (sums, gathers, hops), `moves` (weights between layouts), on a
  `cluster` of `hardware`, for a `workload` of a model's `model_work`.

* `measured` measures a machine for a `profile`, which `calibration` chooses among those that are kept.

Enters: a recipe, a dataflow, shapes, a cluster. Leaves: plans, bytes and seconds. Torch is imported in `measured`, and
where a function reads the parameters of a model (`placement`, `estimate`) or asks for GPUs (`placement`, `machine`).
"""
