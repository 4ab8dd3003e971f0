"""Moves of real tensors: executes, on each rank, the plans that `layout.move` makes.

* `mover`: runs a plan between ranks, a message at a time, and reports the bytes.
* `memory`: flat buffers, their strided parts, and the staging memory of messages.
* `communicator`: messages of one process group, counted; every wait has a deadline and a cause.
* `stores`: files that moves read and write; `saving` and loading under any layouts.
* `offload`: the buffers of an idle role in host memory.

Enters: a `MovePlan`, flat tensors by buffer name, a process group. Leaves: the same tensors, written in place. Imports
`layout`, `schedule.work`, `models.parallel.nccl` and `errors`; knows no model.
"""
