"""A machine, measured: what its products, copies, layers and links take, with the engines that a run computes with.

`measuring` makes a profile of a model's layers: `work` is what is timed, `models` what it is timed with, `sizes` at
which sizes, `sharded_layer` what a layer takes that two processes shard, `links` what they send each other, `stopwatch`
how long anything takes on a busy machine; `rates` are those of a copy and of a large product.

Enters: a model's shape, a dtype, a device. Leaves: seconds and rates. Imports torch, which the rest of `cost` does not.
"""
