"""Ranks on several machines: a process on each starts them there, and carries what they and the leader say.

* `place`: which node a command is, by its options or by the variables of Slurm or torchrun.
* `run_key`: the key of the run, and the file in which nodes of a shared folder find it.
* `introduction`: how two ends meet over the network, and prove to each other that they have the key.
* `interfaces`: the network interface that has an address.
* `messages`, `relay`: what goes over the connection of a node: words of its own, and the bytes of its ranks.
* `on_ray`: has Ray start the agents; `room`: on how many nodes of a cluster, and what is said where there is no room.
* `agent`: the process of a node; `link`: the leader's end, `remote_process` one of its ranks there; `echoes`: how fast
  a node is reached, and its clock.
* `gathering`: the leader waits until all are there; `joining`: another command joins it; `refusing`: the leader refuses
  its run, and tells the others; `gathered`: the nodes from then on.

**The leader listens only until all nodes have come**, on the address that it was told. Each end proves that it has the
run's key before anything of the other is unpickled; every message carries a tag made with a key of the connection.
What is said is not secret: whoever can read the network can read it.

**A node that is lost is seen**: by its connection, or by its silence. A node that hears nothing of its leader ends its
ranks and itself, so nothing is left on either side of a cut.

**Workers do not know**: their connection ends at their node's agent as it would end at the leader, and its messages
carry tags of their own. What a group of one machine does, one of several does alike.
"""
