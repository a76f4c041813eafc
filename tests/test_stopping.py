"""Where an answer ends: earliest completion wins, nothing behind it is kept, no part of a stop string is shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from saguaro_core.decoding.detokenizer import Detokenizer
from saguaro_core.decoding.stopping import AnswerBuilder, ReleasedToken

# Whole tokens, tokens that end inside a stop string, and the two halves of "é" in the byte-level alphabet.
WORDS = ("a", "b", "ab", "ba", "aab", "#", "Ċ#", "##", "ĠhaĠ", "ha!", "Ã", "©", "Ã©a", "bÃ")
EOS = len(WORDS)


def toy_tokenizer() -> Any:
    vocabulary = {word: index for index, word in enumerate([*WORDS, "<end>"])}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="a"))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=backend, eos_token="<end>")


TOKENIZER = toy_tokenizer()


def ids_of(*words: str) -> list[int]:
    return [EOS if word == "<end>" else WORDS.index(word) for word in words]


@dataclass(frozen=True)
class Answer:
    """What a finished answer consists of."""

    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    reason: str | None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def new_builder(
    stop: Sequence[str] = (), cap: int = 100, eos: Sequence[int] = (EOS,), room: int = 10**9, tokenizer: Any = TOKENIZER
) -> AnswerBuilder[object]:
    return AnswerBuilder(Detokenizer(tokenizer), eos, stop, cap, room)


def answer_of(builder: AnswerBuilder[object], blocks: Sequence[Sequence[int]]) -> Answer:
    """Push the blocks, finish, and check what holds for every answer."""
    payloads = [[object() for _ in block] for block in blocks]
    released: list[ReleasedToken[object]] = []
    for block, marks in zip(blocks, payloads, strict=True):
        released += builder.push(zip(block, marks, strict=True))
    released += builder.finish()
    assert builder.finish() == []
    assert [token.index for token in released] == list(range(len(released)))
    assert tuple(token.token_id for token in released) == builder.token_ids
    marks_in_order = [mark for marks in payloads for mark in marks]
    assert all(token.payload is mark for token, mark in zip(released, marks_in_order, strict=False))
    assert "".join(token.text for token in released) == builder.text
    assert builder.num_remaining == 0
    return Answer(builder.token_ids, tuple(token.text for token in released), builder.stop_reason)


def blocks_of(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Cut the ids into blocks of the given sizes, the last one repeated."""
    blocks, start = [], 0
    for index in range(len(ids)):
        size = sizes[min(index, len(sizes) - 1)]
        blocks.append(list(ids[start : start + size]))
        start += size
    return [block for block in blocks if block]


@pytest.mark.parametrize("size", range(1, 9))
def test_end_of_turn_at_every_offset_of_a_block(size: int) -> None:
    ids = ids_of("a", "b", "ab", "<end>", "a", "<end>")
    answer = answer_of(new_builder(), blocks_of(ids, [size]))
    assert answer == Answer(tuple(ids[:4]), ("a", "b", "ab", ""), "eos")


def test_an_ordinary_token_declared_end_of_turn_has_no_text() -> None:
    answer = answer_of(new_builder(eos=ids_of("b", "##")), [ids_of("a", "b", "a")])
    assert answer == Answer(tuple(ids_of("a", "b")), ("a", ""), "eos")


def test_no_end_of_turn_ids_run_to_the_cap() -> None:
    ids = ids_of("a", "<end>", "b", "a")
    answer = answer_of(new_builder(eos=(), cap=3), [ids])
    assert answer == Answer(tuple(ids[:3]), ("a", "", "b"), "length")


@pytest.mark.parametrize("cap", [1, 2, 3, 7, 8, 9, 10])
@pytest.mark.parametrize("size", [1, 3, 9])
def test_the_cap_is_exact(cap: int, size: int) -> None:
    answer = answer_of(new_builder(cap=cap), blocks_of([0] * 12, [size]))
    assert len(answer.token_ids) == cap
    assert answer.text == "a" * cap
    assert answer.reason == "length"


def test_the_room_in_the_context_is_a_cap() -> None:
    builder = new_builder(cap=100, room=4)
    assert builder.num_remaining == 4
    builder.push([(0, None)])
    assert builder.num_remaining == 3
    assert answer_of(new_builder(cap=100, room=4), [[0] * 9]).reason == "length"


@pytest.mark.parametrize(("cap", "room"), [(0, 5), (-1, 5), (5, 0)])
def test_no_room_is_refused(cap: int, room: int) -> None:
    with pytest.raises(ValueError, match="give at least 1"):
        new_builder(cap=cap, room=room)


def test_stop_before_the_cap_in_one_block() -> None:
    ids = ids_of("a", "b", "##", "a", "a", "a")
    answer = answer_of(new_builder(["##"], cap=5), [ids])
    assert answer == Answer(tuple(ids[:3]), ("a", "b", ""), "stop")


def test_cap_before_the_stop_in_one_block() -> None:
    ids = ids_of("a", "b", "a", "a", "a", "##")
    answer = answer_of(new_builder(["##"], cap=5), [ids])
    assert answer == Answer(tuple(ids[:5]), ("a", "b", "a", "a", "a"), "length")


def test_stop_at_the_very_cap_is_a_stop() -> None:
    answer = answer_of(new_builder(["##"], cap=2), [ids_of("a", "##")])
    assert answer == Answer(tuple(ids_of("a", "##")), ("a", ""), "stop")


def test_end_of_turn_at_the_very_cap_is_an_end_of_turn() -> None:
    assert answer_of(new_builder(cap=2), [ids_of("a", "<end>")]).reason == "eos"


def test_the_earliest_completion_wins_not_the_order_of_the_list() -> None:
    ids = ids_of("a", "b", "#", "a", "##")
    answer = answer_of(new_builder(["##", "b#"]), [ids])
    assert answer == Answer(tuple(ids[:3]), ("a", "", ""), "stop")


def test_of_two_completions_at_one_character_no_part_of_either_is_shown() -> None:
    assert answer_of(new_builder(["b", "ab"]), [ids_of("#", "ab")]).text == "#"


def test_the_earliest_completion_inside_one_token_wins() -> None:
    assert answer_of(new_builder(["aab", "aa"]), [ids_of("#", "aab")]).text == "#"
    assert answer_of(new_builder(["ab", "a"]), [ids_of("#", "ba")]).text == "#b"


def test_what_could_become_a_stop_string_is_not_shown() -> None:
    builder = new_builder(["\n###"])
    assert [t.text for t in builder.push([(i, None) for i in ids_of("a", "Ċ#")])] == ["a"]
    assert builder.push([(ids_of("#")[0], None)]) == []
    assert [t.text for t in builder.push([(ids_of("b")[0], None)])] == ["\n#", "#", "b"]
    assert builder.stop_reason is None


def test_a_stop_string_over_three_blocks_is_never_shown() -> None:
    ids = ids_of("a", "Ċ#", "#", "##", "a")
    answer = answer_of(new_builder(["\n###"]), [ids[:2], ids[2:3], ids[3:]])
    assert answer == Answer(tuple(ids[:4]), ("a", "", "", ""), "stop")


def test_text_before_the_stop_in_its_first_token_is_kept() -> None:
    answer = answer_of(new_builder(["b#"]), [ids_of("ab", "#")])
    assert answer.pieces == ("a", "")


def test_a_false_start_is_shown_in_full() -> None:
    ids = ids_of("ĠhaĠ", "ha!", "a")
    answer = answer_of(new_builder([" ha ha ha"]), [[i] for i in ids])
    assert answer == Answer(tuple(ids), (" ha ", "ha!", "a"), None)


def test_a_false_start_that_overlaps_the_real_one() -> None:
    ids = ids_of("a", "a", "a", "b", "a")
    answer = answer_of(new_builder(["aab"]), [[i] for i in ids])
    assert answer == Answer(tuple(ids[:4]), ("a", "", "", ""), "stop")


def test_held_text_is_shown_when_the_answer_ends_otherwise() -> None:
    for last, cap, reason in (("<end>", 100, "eos"), ("Ċ#", 2, "length")):
        answer = answer_of(new_builder(["\n###"], cap=cap), [ids_of("a"), ids_of("Ċ#", last)][:2])
        assert answer.text == "a\n#"
        assert answer.reason == reason


def test_a_cancelled_answer_keeps_held_text_and_the_open_character() -> None:
    answer = answer_of(new_builder(["\n###"]), [ids_of("a", "Ċ#", "Ã")])
    assert answer == Answer(tuple(ids_of("a", "Ċ#", "Ã")), ("a", "\n#", "\ufffd"), None)


def test_the_open_character_belongs_to_the_token_before_the_end_of_turn() -> None:
    answer = answer_of(new_builder(), [ids_of("a", "Ã"), ids_of("<end>")])
    assert answer == Answer(tuple(ids_of("a", "Ã", "<end>")), ("a", "\ufffd", ""), "eos")


def test_the_token_that_opens_a_character_waits_for_the_next() -> None:
    builder = new_builder()
    assert [t.text for t in builder.push([(i, None) for i in ids_of("a", "bÃ")])] == ["a"]
    assert [t.text for t in builder.push([(ids_of("©")[0], None)])] == ["b", "é"]


def test_a_stop_string_may_hold_any_character() -> None:
    answer = answer_of(new_builder(["é"]), [ids_of("bÃ"), ids_of("©", "a")])
    assert answer == Answer(tuple(ids_of("bÃ", "©")), ("b", ""), "stop")


def test_nothing_is_taken_after_the_end() -> None:
    builder = new_builder(cap=1)
    builder.push([(0, None)])
    assert builder.push([(0, None)]) == []
    assert builder.token_ids == (0,)


def test_ids_text_and_counts_agree_after_a_stop(default_target_dir: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(default_target_dir)
    for stop in ("\n###", "</answer>", "Observation:", " ha ha ha"):
        ids = tokenizer.encode(f"One two.{stop} three")
        for size in range(1, 9):
            answer = answer_of(new_builder([stop], tokenizer=tokenizer), blocks_of(ids, [size]))
            assert answer.text == "One two."
            assert answer.reason == "stop"
            assert stop in tokenizer.decode(list(answer.token_ids))
            assert stop not in tokenizer.decode(list(answer.token_ids[:-1]))


def reference(ids: Sequence[int], stop: Sequence[str], cap: int) -> tuple[tuple[int, ...], str, str | None]:
    """The whole text decoded anew after every token, and searched from its start."""

    def decoded(part: Sequence[int]) -> str:
        return str(TOKENIZER.decode(list(part), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    for count in range(1, len(ids) + 1):
        kept = ids[:count]
        if kept[-1] == EOS:
            return tuple(kept), decoded(kept), "eos"
        complete = decoded(kept)
        if WORDS[kept[-1]].endswith("Ã"):
            complete = complete.removesuffix("\ufffd")
        ends = [(complete.find(s) + len(s), complete.find(s)) for s in stop if s in complete]
        if ends:
            return tuple(kept), complete[: min(ends)[1]], "stop"
        if count == cap:
            return tuple(kept), decoded(kept), "length"
    return tuple(ids), decoded(ids), None


ANY_IDS = st.lists(st.one_of(st.integers(0, len(WORDS) - 1), st.integers(0, 7)), max_size=25)
ANY_STOP = st.lists(
    st.one_of(st.text("ab#\n", min_size=1, max_size=5), st.sampled_from(["é", "éa", " ha ha"])), max_size=4
)


@given(ANY_IDS, ANY_STOP, st.integers(1, 30), st.booleans(), st.lists(st.integers(1, 9), min_size=1))
def test_the_answer_is_the_same_for_every_partition_and_equals_the_reference(
    ids: list[int], stop: list[str], cap: int, has_eos: bool, sizes: list[int]
) -> None:
    ids = [*ids, EOS] if has_eos else ids
    answer = answer_of(new_builder(stop, cap), blocks_of(ids, sizes))
    assert answer == answer_of(new_builder(stop, cap), [ids])
    assert (answer.token_ids, answer.text, answer.reason) == reference(ids, stop, cap)


@given(ANY_IDS, ANY_STOP)
def test_what_was_shown_is_never_taken_back(ids: list[int], stop: list[str]) -> None:
    final = answer_of(new_builder(stop), [ids]).text
    builder = new_builder(stop)
    for token_id in ids:
        builder.push([(token_id, None)])
        assert final.startswith(builder.text)
        assert builder.stop_reason is None or builder.text == final
