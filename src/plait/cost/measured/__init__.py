"""A machine, measured: what its products, copies, layers and links take, with the engines that a run computes with.

`measuring` makes a profile of a model's layers: `work` is what is timed, `cut` what two processes do that have a half
of each layer, `links` what they send each other, `host` what a device and its host's memory do, `stopwatch` how long
anything takes on a machine that is busy; `rates` are those of a copy and of a large product.

Enters: a model's shape, a dtype, a device. Leaves: seconds and rates. Imports torch, which the rest of `cost` does not.
"""
