"""What a run is given, read and checked: its recipe, its data, its tokenizers. Loads no weights."""
