"""Transformers models: admission, packed forward, attention, log-probs, weights in flat buffers.

Enters: the name of a checkpoint, a packed batch. Leaves: hidden states, logits, log-probs and their gradients; a
Hugging Face folder. Imports `data`, `layout` and below; `transformers` is imported where a model is first loaded.
"""
