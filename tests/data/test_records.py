"""What messages call prompts and samples."""

from __future__ import annotations

import pytest

from plait.data.records import EVALUATION_UID, MadeOf, Prompt, shown_uid


@pytest.mark.parametrize(
    ("uid", "columns", "prompt", "sample"),
    [
        (7, {}, "prompt 7", "sample 7.2"),
        (7, {"id": "q17"}, "prompt 7 (`id` q17)", "sample 7.2 (`id` q17)"),
        (7, {"id": None}, "prompt 7", "sample 7.2"),
        (EVALUATION_UID + 4, {}, "prompt 5 of the evaluation", "sample 5.2 of the evaluation"),
        (
            EVALUATION_UID,
            {"id": 31},
            "prompt 1 of the evaluation (`id` 31)",
            "sample 1.2 of the evaluation (`id` 31)",
        ),
    ],
)
def test_items_of_an_evaluation_are_counted_from_one_and_rows_with_an_id_say_it(
    uid: int, columns: dict[str, object], prompt: str, sample: str
) -> None:
    named = Prompt(uid, "text", (1,), columns)
    assert named.title() == prompt
    assert named.title(2) == sample
    assert named.name == str(uid), "by which draws are seeded"


def test_what_is_made_of_an_item_is_called_by_it() -> None:
    made = Prompt(3, "text", (1,), made_of=MadeOf(EVALUATION_UID + 1, ((4, 0),)))
    assert made.title() == "the prompt made of sample 2.0 of the evaluation"
    assert [shown_uid(uid) for uid in ("3.1.0", f"{EVALUATION_UID + 1}.1.0", "")] == ["3.1.0", "2.1.0", ""]
