"""Launchers: they start the processes that host the models, carry calls to them, and turn every end into an error.

    with LocalProcesses(threads=1, output_dir=run / "workers").start(Engine, num_ranks=2, arguments=(plan,)) as group:
        training = group.submit([0, 1], "train", batch_ids)     # returns at once; a list: one answer per rank
        print(training.result(deadline_s=600.0))

* `group`: running workers, and the handles of what they were asked.
* `worker_context`: what a worker knows: its rank, its place, the rendezvous.
* `local`: one process per rank on this machine; `process` is one of them, `worker` its other side, `wire` between them.
  `node` is what this machine and others have in common as places of ranks, `machine` what this one has; `nodes` are
  those of several machines.
* `watch`: when a rank counts as lost, and which stand still; `monitor` looks after a group by it, of `watched_rank`s; a
  `bell` wakes it.
* `keys`: the rendezvous of `torch.distributed`, which the controller keeps; `store` is how a worker asks for it.
* `failures`: the one error that a rank's death, freeze, exception or lateness becomes.

**Enters**: a class that the worker process can import, small arguments. **Leaves**: small results and `WorkerError`.
Arrays go from worker to worker (`torch.distributed` on `WorkerContext.store`), never through here: a message over
`wire.MAX_MESSAGE_BYTES` is refused, and a group counts the bytes that it carried.

**Order**: a rank runs one action at a time, in the order submitted; handles of disjoint ranks run at the same time.

**Every wait ends**: with the result, at its deadline, or when a rank dies (seen at once by its connection), freezes
(it has sent no heartbeat for `freeze_after_s`; the heartbeat comes from a thread of its own, so an action may last as
long as it likes unless it holds the interpreter lock for all that time), stalls (where there is a `progress`: it makes
none for `stalled_after_s`, and waits for nobody who does), or raises. A rank that died, froze or stalled ends the whole
group: its peers may wait for it in a collective for ever. An exception does not end the group, but it interrupts
whoever waits for another rank, once.

**Nothing is left**: processes have a group of their own which the kernel kills when the controller's end of a pipe
closes, however the controller ended. They talk over a socket pair that was never bound to a name or port; every
message carries a tag made with the group's key, and nothing untagged is unpickled. The rendezvous of
`torch.distributed` goes over these connections too, so a group of the launcher listens nowhere. What its workers open
by `torch.distributed` is their own: gloo's pairs listen on loopback, and do not authenticate who connects.

Imports `errors`, `memory_limits`, `orphan_guard`, `temporary_folder` and the standard library; torch only inside
workers that ask for the store.
"""
