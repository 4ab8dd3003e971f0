"""Drawing samples: requests enter, finished samples leave, each as soon as it ends.

* What is asked: `settings` are keys of a recipe, `sampling` and `request` what an engine is given, `response` a sample
  in the making, `checks` what is refused, `stopping` stop strings.
* `engine` is the steppable loop over its `state`: `flight` has the samples, `decode_batch` their rows, `overlap` the
  steps under way, `step_record`, `step_clock` and `occupancy` say how they went. `moves` and `transfer` let a sample go
  on elsewhere, `joint` steps ranks together, `link` connects stages. Who runs when is decided in `policy.batching`.
* Memory: `pool` holds keys and values in blocks, `states` those of recurrent layers, `kept_experts` the experts of
  tokens. Samples that wait for new weights are kept by `parking`.
* A step: `ragged` packs it, `ragged_context` and `step_segments` lay out attention and recurrent layers, `forward`
  computes it by a `backend` (`refused` says why not by another): `module_forward` with `paged` attention, in `exact`
  mode if asked, or `compiled_forward` on a CPU (`dense_layers`, `dense_settings`, `panels`, `kernel_threads`; `proof`
  shows that it is right). On a GPU `captured` replays steps (`captured_step`, `prompt_captures`, `cuda_graphs`),
  `fused_layers` and `joined_products` make layers faster.
* The draw: `drawing` says who draws, `sampler` makes tokens of logits, `candidates` by torch's operators.
* Drafts: `speculates` is their protocol, `speculator` drafts from known texts, `model_drafter` by a draft model
  (`draft_chains`, `draft_steps`, `draft_seconds`, `drafted_text`), `steady_drafts` only where no bit can change.

May import models, kernels, data and what lies below them; never training or runtime. `settings` imports no torch.
"""
