"""Rewards: functions in TRL's, verl's or OpenRLHF's signature in killable worker processes, scorers of tasks, figures
of an evaluation.

* `settings` name the functions, `functions` makes them ready to send, `loading` finds one, `signature` tells its form,
  `calls` and `reply_call` are its arguments, `seeds` its random numbers.
* `pool` takes groups of samples and gives scores: a `group` needs calls, `submitted` groups are under way,
  `call_workers` make calls, `call_results` and `scores` come back; `replies` are between turns, `tools` (and
  `tool_calls`) make some, `function_kinds` names both.
* `process` is the parent's side of a worker process, `worker` its other side (`concurrent_calls`, `awaiting` for
  coroutines), `pool_worker` one with its open calls.
* `answers` finds the answer in a response, `tasks` scores those of reasoning_gym; `evaluation` and `statistics` are the
  figures of an evaluation.

Enters: samples. Leaves: one number per sample and function, and their weighted sum. Imports no torch; may import
`data` and `errors`.
"""
