"""Transformers models: admission, packed forward, attention, log-probs, weights in flat buffers.

`language_model` and `scalar_model` are what computes, `loading` and its neighbours read and admit them, `lora` adapts
them, `flat_weights` and `working_weights` hold their numbers; `files` are checkpoints, `parallel` parts over ranks,
`compute` pieces of a forward.

Enters: the name of a checkpoint, a packed batch. Leaves: hidden states, logits, log-probs and their gradients; a
Hugging Face folder. Imports `kernels`, `data`, `layout` and below; `transformers` is imported where a model is first
loaded. `shape`, `logits_room` and `lora_settings` import no torch.
"""
