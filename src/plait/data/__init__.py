"""Prompts, samples and the packed batch.

Enters: data sets and tokenizers. Leaves: `Prompt` and `Sample` records, columns over them, and the one packed,
un-padded layout in which models read them. Imports `policy` and what lies below it; torch in `packed` alone.
"""
