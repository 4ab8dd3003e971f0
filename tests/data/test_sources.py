import bz2
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from plait.data import tasks
from plait.data.settings import DataSettings
from plait.data.sources import open_held_out, open_splits, read_prompts, read_rows
from plait.errors import DataError
from tests.data.json_rows import written


def write(path: Path, *rows: object) -> Path:
    return Path(written(path, rows))


# -- JSONL


def test_text_prompts_keep_their_columns_and_absent_ones_are_none(tmp_path):
    file = write(tmp_path / "a.jsonl", {"prompt": "2+2?", "answer": "4"}, {"prompt": "3+3?", "hint": "even"})
    rows = read_prompts(file)
    assert [row.columns for row in rows] == [
        {"prompt": "2+2?", "answer": "4", "hint": None},
        {"prompt": "3+3?", "answer": None, "hint": "even"},
    ]
    assert rows[1].place == f"{file}:2"


def test_messages_and_blank_lines_and_line_separators_inside_strings(tmp_path):
    messages = [{"role": "user", "content": "a\u2028b"}]
    file = tmp_path / "m.jsonl"
    file.write_text("\n" + json.dumps({"prompt": messages}, ensure_ascii=False) + "\r\n\n", encoding="utf-8")
    assert [row.prompt for row in read_prompts(file)] == [messages]


def test_pairs_of_surrogates_and_calls_of_tools_are_no_fault(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "\\ud83d\\ude00 \\\\ud800"}\n')
    assert read_prompts(file)[0].prompt == "😀 \\ud800"
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]},
        {"role": "tool", "content": "b"},
    ]
    assert read_prompts(write(tmp_path / "b.jsonl", {"prompt": messages}))[0].prompt == messages


def test_contents_in_parts_are_one_text(tmp_path):
    parts = [{"type": "text", "text": "2+2"}, {"type": "text", "text": "?"}]
    file = write(tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": parts}]})
    assert read_prompts(file)[0].prompt == [{"role": "user", "content": "2+2?"}]


def test_another_prompt_column(tmp_path):
    rows = read_rows(str(write(tmp_path / "a.jsonl", {"question": "q", "answer": "a"})), prompt_column="question")
    assert rows[0].columns == {"prompt": "q", "question": "q", "answer": "a"}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{"prompt": "a"}', '{"prompt": }'], ["a.jsonl:2", "malformed JSON", "column 12", "data.source"]),
        (["prompt,answer", "x,y"], ["a.jsonl:1", "malformed JSON", "a table is read from a file named *.csv"]),
        (['{"prompt": "a"}', "", '["a"]'], ["a.jsonl:3", "expected a JSON object", "list", "one object per line"]),
        (['{"promt": "a", "x": 1}'], ["a.jsonl:1", "no column `prompt`", "did you mean `promt`", "data.prompt_column"]),
        (["{}"], ["no column `prompt`", "found no column"]),
        (['{"prompt": 7}'], ["a.jsonl:1", "text or a list of messages", "found a number"]),
        (['{"prompt": null}'], ["a.jsonl:1", "text or a list of messages", "found null"]),
        (['{"prompt": []}'], ["a.jsonl:1", "empty list of messages"]),
        (['{"prompt": [{"rol": "user", "content": "a"}]}'], ["a.jsonl:1", '"role"']),
        (['{"prompt": "a"}', '{"prompt": [{"role": "user", "content": "a"}]}'], ["mixed formats", "a.jsonl:2"]),
        (['{"prompt": [{"role": "user", "content": null}]}'], ["a.jsonl:1", "must be a text", '"content": null']),
        (['{"prompt": [{"role": "user", "content": []}]}'], ["a.jsonl:1", "must be a text", '"content": []']),
        (['{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}'], ["must be a text", '"type": "image"']),
        (['{"prompt": [{"role": "user", "content": 7}]}'], ["a.jsonl:1", "must be a text", '"content": 7']),
        (['{"prompt": "a"}', '{"prompt": "b", "x": ["\\uD800"]}'], ["a.jsonl:2", "`x`", "lone surrogate (\\ud800)"]),
        (['{"prompt": "a", "completions": "x"}'], ["a.jsonl:1", "`completions`", "rename"]),
        (['{"prompt": "a", "images": ["x"]}'], ["a.jsonl:1", "column `images`"]),
        (['{"prompt": "a", "image": "x.png"}'], ["a.jsonl:1", "column `image`"]),
        (['{"prompt": [{"role": "human", "content": "a"}]}'], ["a.jsonl:1", "`human`, as ShareGPT", "write `user`"]),
        (['{"prompt": [{"role": "User", "content": "a"}]}'], ["a.jsonl:1", "the role `User`; write `user`"]),
        ([""], ["holds no row", "data.source"]),
    ],
)
def test_bad_files_are_named_with_line_and_key(tmp_path, lines, said):
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(DataError) as caught:
        read_prompts(file)
    for words in said:
        assert words in str(caught.value)


def test_missing_file_names_the_nearest_and_a_folder_is_no_file(tmp_path):
    write(tmp_path / "prompts.jsonl", {"prompt": "a"})
    with pytest.raises(DataError, match=r"does not exist \(did you mean `prompts.jsonl`\?\)"):
        read_prompts(tmp_path / "prompt.jsonl")
    with pytest.raises(DataError, match="is a folder"):
        read_prompts(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        read_prompts(tmp_path / "no" / "such.jsonl")
    with pytest.raises(DataError, match=r"`/dev/null` is a device, not a file; give a JSONL"):
        read_prompts(Path("/dev/null"))
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match=r"pipe\.jsonl` is a pipe, not a file; give a JSONL"):
        read_prompts(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match=r"below\.jsonl` cannot be read \(Not a directory\)"):
        read_prompts(tmp_path / "prompts.jsonl" / "below.jsonl")
    with pytest.raises(DataError, match=r"x` cannot be read \(File name too long\)"):
        read_prompts(tmp_path / ("x" * 300))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("a*.jsonl", r"`a\*\.jsonl` does not exist; a source is one file: several are a list of sections, `data: \["),
        ("[a.jsonl, b.jsonl]", "does not exist; a source is one file: several are"),
        ("a.jsonl,b.jsonl", "does not exist; a source is one file: several are"),
        ("openai/gsm8k", "`openai/gsm8k` does not exist; of the Hugging Face hub it is `hf:openai/gsm8k`"),
        ("folder/rows", r"`folder/rows` does not exist; give a JSONL, JSON, CSV or Parquet file"),
        ("https://x.org/a.jsonl", "`https://x.org/a.jsonl` does not exist; an address is not read: fetch"),
    ],
)
def test_what_is_meant_by_a_name_of_no_file(tmp_path, monkeypatch, source, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "a.jsonl", {"prompt": "a"})
    write(tmp_path / "b.jsonl", {"prompt": "b"})
    with pytest.raises(DataError, match=says):
        open_splits(DataSettings(source=source))


def test_a_file_that_is_not_utf8(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(DataError, match="not UTF-8"):
        read_prompts(file)
    file.write_bytes('{"prompt": "a"}\n{"prompt": "ä"}\n'.encode("cp1252"))
    with pytest.raises(DataError, match=r"not UTF-8 \(line 2: .*: iconv -f WINDOWS-1252 -t UTF-8 "):
        read_prompts(file)
    file.write_bytes('{"prompt": "a"}\n'.encode("utf-16"))
    with pytest.raises(DataError, match=r"is UTF-16; .*: iconv -f UTF-16 -t UTF-8 .*a\.jsonl > rows\.jsonl$"):
        read_prompts(file)
    file.write_bytes(bz2.compress(b'{"prompt": "a"}'))
    with pytest.raises(DataError, match=r"a\.jsonl` is packed by bzip2; `data\.source` takes JSONL, .*: unpack it"):
        read_prompts(file)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress('{"prompt": "ä"}\n'.encode("cp1252")))
    with pytest.raises(DataError, match=r"not UTF-8 .*: zcat .*a\.jsonl\.gz \| iconv -f WINDOWS-1252 -t UTF-8 > rows"):
        read_prompts(packed)


@pytest.mark.parametrize(
    ("name", "begin", "said"),
    [
        ("a.XLSX", b"PK\x03\x04\xff", r'of a table make such a file by pandas\.read_excel\(".*a\.XLSX"\)'),
        (
            "a.csv",
            b"prompt\n\xe4\n",
            r"not UTF-8 \(line 2: .*: iconv -f WINDOWS-1252 .*a\.csv > rows\.csv, if",
        ),
        ("a.zip", b"PK\x03\x04\xff", "is packed by zip; .*: unpack it"),
        ("a.zip", b"PK\x03\x04", "it is packed by zip: unpack it"),  # bytes that are a text, too
    ],
)
def test_a_table_is_known_by_its_name_before_it_is_taken_for_packed(tmp_path, name, begin, said):
    (tmp_path / name).write_bytes(begin)
    with pytest.raises(DataError, match=said):
        read_prompts(tmp_path / name)


# -- splits of files


@given(
    questions=st.lists(st.integers(0, 15).map(str), min_size=2, max_size=40),
    items=st.integers(0, 8),
    seed=st.integers(0, 3),
    shuffled=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_file_splits_are_disjoint_distinct_and_blind_to_row_order(tmp_path_factory, questions, items, seed, shuffled):
    folder = tmp_path_factory.mktemp("split")
    file = write(folder / "a.jsonl", *({"prompt": text, "n": n} for n, text in enumerate(questions)))
    asked = DataSettings(source=str(file), seed=seed)
    if len(set(questions)) <= items:
        with pytest.raises(DataError, match=r"evaluation\.items"):
            open_splits(asked, items)
        return
    splits = open_splits(asked, items)
    held_out = [row.prompt for row in splits.evaluation.rows] if splits.evaluation else []
    assert len(held_out) == len(set(held_out)) == items
    trained = [row.prompt for row in splits.train.rows]
    assert trained == [text for text in questions if text not in held_out]
    assert splits.num_removed == len(questions) - len(trained)
    shuffled.shuffle(questions)
    again = open_splits(
        DataSettings(source=str(write(folder / "b.jsonl", *({"prompt": q} for q in questions))), seed=seed), items
    )
    assert ([row.prompt for row in again.evaluation.rows] if again.evaluation else []) == held_out


def test_an_evaluation_file_takes_its_questions_out_of_training(tmp_path):
    train = write(tmp_path / "t.jsonl", *({"prompt": str(n)} for n in range(5)))
    held = write(tmp_path / "e.jsonl", *({"prompt": str(n)} for n in (3, 4, 9, 9)))
    items = open_held_out(DataSettings(source=str(held)), 3)
    assert sorted(row.prompt for row in items.rows) == ["3", "4", "9"]
    assert open_held_out(DataSettings(source=str(held)), None).rows == items.rows, "one of each question"
    (few,) = open_held_out(DataSettings(source=str(held)), 1).rows
    assert few == items.rows[0], "more items are further ones"
    splits = open_splits(DataSettings(source=str(train)), 0, held_elsewhere={row.question for row in items.rows})
    assert [row.prompt for row in splits.train.rows] == ["0", "1", "2"]
    assert splits.num_removed == 2
    with pytest.raises(DataError, match=r"`data\.items` asks for 4 questions, .* has 3 distinct ones"):
        open_held_out(DataSettings(source=str(held)), 4)


def test_size_of_a_file(tmp_path):
    file = write(tmp_path / "t.jsonl", *({"prompt": str(n)} for n in range(5)))
    assert len(open_splits(DataSettings(source=str(file), size=3)).train) == 3
    with pytest.raises(DataError, match=r"`data\.size` asks for 6 .* has 5"):
        open_splits(DataSettings(source=str(file), size=6))
    with pytest.raises(DataError, match=r"`data\.parameters`"):
        open_splits(DataSettings(source=str(file), parameters={"a": 1}))


# -- tasks


@pytest.fixture
def in_process(monkeypatch):
    """Draw here, without the start of a child."""
    monkeypatch.setattr(tasks, "draw_in_child", tasks.draw)


def task(name: str, **keys: object) -> DataSettings:
    return DataSettings(source=f"reasoning_gym:{name}", **keys)


def test_task_splits_are_disjoint_and_fixed_by_the_data_seed(in_process):
    asked = task("chain_sum", parameters={"max_terms": 2, "max_digits": 1}, size=50)
    splits = open_splits(asked, 40)
    trained = {row.question for row in splits.train.rows}
    held_out = [row.question for row in splits.evaluation.rows]
    assert len(trained) == 50
    assert len(set(held_out)) == 40
    assert not trained & set(held_out)
    more = open_splits(asked.model_copy(update={"size": 60}), 40)
    assert [row.question for row in more.evaluation.rows] == held_out
    assert more.train.rows[:50] == splits.train.rows
    other = open_splits(asked.model_copy(update={"seed": 1}), 40)
    assert [row.question for row in other.evaluation.rows] != held_out


def test_rows_of_a_task_carry_what_its_scorer_needs(in_process):
    row = open_splits(task("chain_sum", parameters={"max_terms": 2}, size=1)).train[0]
    assert list(row.columns) == ["prompt", "answer", "metadata", "task", "task_parameters"]
    left, operator, right = row.columns["metadata"]["expression"].split()
    assert int(row.columns["answer"]) == (int(left) + int(right) if operator == "+" else int(left) - int(right))
    assert row.columns["task_parameters"] == {"max_terms": 2}


def test_a_small_task_is_used_up_or_refused(in_process):
    # One-digit sums and differences of two terms: at most 200 questions.
    asked = task("chain_sum", parameters={"max_terms": 2, "max_digits": 1})
    splits = open_splits(asked, 50)
    assert 140 <= len(splits.train) <= 150
    with pytest.raises(DataError, match=r"`data\.size` asks for 160 .* gave only"):
        open_splits(asked.model_copy(update={"size": 160}), 50)
    with pytest.raises(DataError, match=r"too few to hold out 200"):
        open_splits(asked, 200)


def test_more_questions_than_one_chunk_of_the_package(in_process):
    # gsm_symbolic raises IndexError past the size that it was created with.
    assert len(open_splits(task("gsm_symbolic", size=600), 10).train) == 600


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (task("chain_som"), "no task `chain_som` (did you mean `chain_sum`?)"),
        (task("chain_sum", parameters={"max_term": 3}), "no such parameter (did you mean `max_terms`?)"),
        (task("chain_sum", parameters={"size": 3}), "set `data.size` instead"),
        (task("chain_sum", parameters={"min_terms": 9}), "max_terms must be >= min_terms"),
        (task("chain_sum", parameters={"max_terms": "x"}), "`data.parameters`: task `chain_sum` refuses"),
        (task("chain_sum", parameters={"max_terms": 2.5}), "`data.parameters`: task `chain_sum` refuses"),
        (task("game_of_life_halting"), "its scorer gives"),
        (task("chain_sum", prompt_column="q"), "`data.prompt_column` is for files"),
    ],
)
def test_wrong_tasks_name_the_key(in_process, settings, said):
    with pytest.raises(DataError) as caught:
        open_splits(settings)
    assert said in str(caught.value)


def test_questions_do_not_depend_on_the_hash_seed_of_the_process():
    # ransom_note walks through sets of letters: drawn in place, its questions would differ in every process.
    splits = open_splits(DataSettings(source="reasoning_gym:ransom_note", size=3), 3)
    here = [row.question for part in (splits.train, splits.evaluation) for row in part.rows]
    code = (
        "from plait.data.settings import DataSettings; from plait.data.sources import open_splits; "
        "splits = open_splits(DataSettings(source='reasoning_gym:ransom_note', size=3), 3); "
        "print([row.question for part in (splits.train, splits.evaluation) for row in part.rows])"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"},
        capture_output=True,
        check=True,
        timeout=60,
        text=True,
    ).stdout
    assert elsewhere == f"{here}\n"
    assert "ransom" in elsewhere


def test_what_a_child_finds_wrong_is_said_here():
    with pytest.raises(DataError, match=r"did you mean `chain_sum`"):
        open_splits(task("chain_som"))


def test_a_task_that_looks_for_a_question_for_ever(monkeypatch):
    monkeypatch.setattr(tasks, "QUESTION_LIMIT_S", 1)
    # Source and target base must differ, so with one base there is no question.
    with pytest.raises(DataError, match=r"found no question within 1 s; change `data\.parameters`"):
        tasks.draw_in_child("base_conversion", {"min_base": 2, "max_base": 2}, 0, 1, 1)


def test_a_missing_package_names_the_extra(monkeypatch, tmp_path):
    (tmp_path / "reasoning_gym.py").write_text("raise ModuleNotFoundError(name='reasoning_gym')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match=r"pip install 'plait\[rewards\]'"):
        open_splits(task("chain_sum"))


def test_settings_refuse_a_template_without_a_place_and_unknown_keys():
    with pytest.raises(ValidationError, match="question"):
        DataSettings(source="a.jsonl", prompt_template="Answer:")
    with pytest.raises(ValidationError, match="extra"):
        DataSettings(source="a.jsonl", promt="x")
