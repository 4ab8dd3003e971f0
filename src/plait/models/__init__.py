"""Transformers models: admission, packed forward, attention, log-probs, weights in flat buffers.

* What computes: `language_model` and `scalar_model` (`model` where it does not matter which), both a `backbone_model`
  around a `backbone`, with a `head`; `outputs` is what they say. `draws` are random numbers of new parameters.
* Loading: `loading` by any name, `language_loading` and `scalar_loading` for the two kinds. `admission` checks a model
  (`layer_calls`, `mixer_proof`; `foreseen` without weights, `reach` for models that read images).
* What a configuration says: `shape`, `layer_types`, `mixer_shape`, `routers` of mixtures, `module_names`, `devices`.
* Adapters: `lora` on linear layers, `expert_adapters` on experts; `lora_settings`, `lora_targets`, `lora_files`,
  `expert_files`, `lora_merging`.
* Weights: `flat_weights`, `working_weights`, `weight_share` of ZeRO-3, `layer_weights` as layers see them;
  `logits_room` says how many logits exist at a time.
* `files` are checkpoints, `parallel` parts over ranks, `compute` pieces of a forward.

Enters: the name of a checkpoint, a packed batch. Leaves: hidden states, logits, log-probs and their gradients; a
Hugging Face folder. Imports `kernels`, `data`, `layout` and below; `transformers` is imported where a model is first
loaded. `shape`, `logits_room` and `lora_settings` import no torch.
"""
