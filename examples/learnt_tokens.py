"""Which tokens of a row are learnt: python examples/learnt_tokens.py [MODEL] [FILE.jsonl]"""

import sys
from pathlib import Path

from plait.data.examples import example_set
from plait.data.formats import RowKind
from plait.data.settings import DataSettings
from plait.data.sources import Source, read_rows
from plait.runtime.inputs.tokenizers import load_tokenizer

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
file = sys.argv[2] if len(sys.argv) > 2 else str(Path(__file__).parent / "conversations.jsonl")

tokenizer = load_tokenizer(model)
source = Source(file, tuple(read_rows(file, RowKind.EXAMPLES)), RowKind.EXAMPLES)
examples = example_set(source, tokenizer, DataSettings(source=file), max_tokens=8192)
for index in range(len(examples)):
    for sample, trained in examples.given(index, uid=index):
        print(f"--- {source[index].place}: {int(sum(trained))} of {len(trained)} response tokens are learnt")
        print(tokenizer.decode(sample.prompt.token_ids), end="")
        for token, learnt in zip(sample.token_ids, trained, strict=True):
            print(f"[{tokenizer.decode([token])}]" if learnt else tokenizer.decode([token]), end="")
        print()
