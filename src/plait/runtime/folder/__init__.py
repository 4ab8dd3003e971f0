"""A run's folder: who holds it, what is in it, how it is begun, resumed, cut back and exported.

* `run_files` names its files, `directory` holds it (`run_lock`), `claim` takes it for a run (also one that has saved
  nothing: `unsaved`), `node_files` compares what several nodes read.
* What it tells: `history` of stays, `stored_recipe`, `named_inputs` with digests, `progressed` (how far), `patience`
  (whether it ends early), `ending`.
* What a resumed run repeats: `decisions` that depended on the clock, `moments` at which samples went on with new
  weights.
* `export` writes weights for Transformers and peft.
"""
