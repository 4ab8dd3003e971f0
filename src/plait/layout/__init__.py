"""The shard algebra, without torch: who holds which block of which tensor, and how to get it elsewhere.

Enters: names, shapes and cuts of a model's parameters; meshes and parallelisms. Leaves: flat buffers of blocks
(`params`, `shards`), holdings of weights, optimizer state, rows, caches and files (`holdings`, `batches`, `stores`),
and plans that move one to another (`move`). Imports `errors` and `file_form` only, and NumPy where it assigns ranks.
"""
