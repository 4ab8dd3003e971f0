"""A run as processes: alone in this one, or supervised from it, a worker for each rank.

* `alone` is a run in this process. Else `supervisor` starts `worker`s (`launching`, on `nodes`), shows their progress
  (`progress_relay`), keeps what they print (`worker_output`) and forwards signals (`forwarded_signals`).
* `restarting` goes on after a loss, on the ranks that `left_places` finds.
* `measured` and `measured_by_ranks` lead evaluations, `generating` answers prompts of a file.
"""
