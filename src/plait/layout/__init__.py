"""The shard algebra, without torch: who holds which block of which tensor, and how to get it elsewhere.

* Where: `mesh` has devices and parallelisms, `params` the parameters and their blocks, `shards` who holds which block,
  `boxes` of elements within a block, `groups` which ranks talk to each other.
* What is held: `holdings` in one common form: of weights, `zero_shares` of optimizer state, `caches` of keys and
  values, `stores` of files; `adapters` and `decoder` are parameters known from a model's numbers.
* Moves: `move` plans from any holdings to any others: `atoms` are missing, `route` (`route_kernels`) says who sends
  them, `move_plan` is the result, `move_cost` what it takes.
* Less to move: `nesting` puts layouts into one memory, `regroup` orders ranks so that they keep most.

Enters: names, shapes and cuts of a model's parameters; meshes and parallelisms. Leaves: flat buffers of blocks,
holdings, and plans that move one to another. Imports `errors` and `file_form` only, and NumPy where it assigns ranks.
"""
