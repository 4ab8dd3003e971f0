"""What a run will take, before anything is loaded: where each model goes, what it holds, and what leaves between calls.

* `placement`: the plan of a run, completed; `rank_order` says which device does what, so that least is moved.
* `device_memory`: what each device holds, of `estimate`, `generation_memory` and `working_memory`.
* `offload_policy`: what leaves a device between calls; `aliasing`: which layouts share memory.
* `limit`: the least time of generation on a machine.

Enters: a recipe, a dataflow, shapes. Leaves: plans and bytes.
"""
