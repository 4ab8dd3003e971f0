"""Which stage of a move comes next, and whose word it waits for."""

from __future__ import annotations

from plait.data.records import Prompt
from plait.workers.call_messages import answer_of
from plait.workers.gathering import Gathering, Left, Said, Stage, Through
from plait.workers.messages import Message
from plait.workers.staged_move import StagedMove

PAIRS = {(0, 2): [(5, 0), (5, 1)], (1, 2): [(6, 0)]}
WHERE = {(5, 0): 0, (5, 1): 0, (6, 0): 1, (7, 0): 2}
MOVE = Gathering(PAIRS, {5: 11, 6: 12}, frozenset({(5, 1)}), move=3, prompts=(Prompt(5, "", (1, 2)),))


def word(stage: Stage, *pairs: tuple[int, int]) -> Said:
    return Said(stage, {pair: Message({"of": list(pair)}) for pair in pairs})


def due(move: StagedMove, where: dict[tuple[int, int], int] = WHERE) -> Stage | None:
    found = move.due(where)
    return None if found is None else found.stage


def told(move: StagedMove, number: int) -> Gathering:
    gathering = move.due(WHERE)
    assert gathering is not None, "something is due"
    move.told(gathering, number)
    return gathering


def test_a_move_at_once_is_one_command() -> None:
    move = StagedMove(MOVE, ahead=False)
    assert told(move, 20).stage is Stage.REST
    assert (due(move), set(move.numbers), move.is_over) == (None, {20}, False)
    move.heard(20, 1, Left([]))
    assert not move.is_over
    move.heard(20, 0, Left([]))
    assert move.is_over


def test_what_goes_ahead_waits_for_one_word_after_the_other() -> None:
    """Targets say what they have; sources what they send; when all do, targets take it; when all is through, the
    rest."""
    move = StagedMove(MOVE, ahead=True)
    assert told(move, 20).concerned == {2}
    assert due(move) is None
    move.heard(20, 2, word(Stage.HERE, (0, 2), (1, 2)))
    give = told(move, 21)
    assert (give.stage, give.concerned) == (Stage.GIVE, {0, 1})
    assert {pair: message.header for pair, message in give.said.items()} == {
        (0, 2): {"of": [0, 2]},
        (1, 2): {"of": [1, 2]},
    }
    move.heard(21, 1, word(Stage.GIVE, (1, 2)))
    move.heard(21, 1, Through())
    assert due(move) is None, "the other source has not begun"
    move.heard(21, 0, word(Stage.GIVE, (0, 2)))
    take = told(move, 22)
    assert (take.stage, take.concerned, take.said.keys()) == (Stage.TAKE, {2}, PAIRS.keys())
    assert due(move) is None, "it is not through"
    move.heard(21, 0, Through())
    rest = move.due({(5, 1): 0, (6, 0): 1})
    assert rest is not None
    assert rest.pairs == {(0, 2): [(5, 1)], (1, 2): [(6, 0)]}, "the first has ended"
    assert (rest.stage, rest.concerned) == (Stage.REST, {0, 1, 2})


def test_a_command_is_as_it_was_behind_its_message() -> None:
    """Arrays of what instances have said included."""
    said = Message({"a": 1}, Gathering({}, {}).to_message().arrays)
    stage = Gathering(PAIRS, {5: 11}, frozenset({(5, 1)}), Stage.GIVE, 3, (Prompt(5, "", (1, 2)),), {(0, 2): said})
    found = Gathering.of(stage.to_message())
    assert (found.pairs, found.numbers, found.recompute) == (PAIRS, {5: 11}, {(5, 1)})
    assert (found.stage, found.move, found.prompts[0].token_ids) == (Stage.GIVE, 3, (1, 2))
    assert found.said[0, 2].header == {"a": 1}


def test_words_of_a_move_are_as_they_were_behind_their_messages() -> None:
    for said in (Left([(5, 1)]), Through()):
        assert answer_of(said.to_message()) == said
    found = answer_of(word(Stage.GIVE, (0, 2)).to_message())
    assert isinstance(found, Said)
    assert (found.stage, found.of_pairs[0, 2].header) == (Stage.GIVE, {"of": [0, 2]})
