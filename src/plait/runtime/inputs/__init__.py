"""What a run is given, read and checked: its recipe, its data, its tokenizers. Loads no weights.

* `prepared` is a run whose inputs are checked, `notices` what a person should know of it; `keys_from_python` makes keys
  of Python values.
* `opened_rows` opens the data, `held_out` are the items of an evaluation, `reading` makes prompts and samples of both
  with `tokenizers` and `prompt_encoders`, `feed` deals them to steps, `text_lengths` counts their tokens. `tools` and
  `tool_schemas` are what the model is told of tools.
"""
