"""Incremental text: joined pieces equal one decode of all ids, and no piece ends inside a character."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from saguaro_core.decoding.detokenizer import Detokenizer

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
BREAKS_LENGTH_DIFFERENCES = (
    "hi🙂!",
    "日本語",
    "café ☕ 日本",
    "∑∫√",
    "한국어 좋아요",
    "😀😁😂",
    "שלום",
    FAMILY,
)


def decode_all(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def pieces_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """One piece per id, then the flushed tail; a second flush must add nothing."""
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    pieces.append(detokenizer.flush())
    assert not detokenizer.is_open
    assert detokenizer.flush() == ""
    return pieces


def id_of(tokenizer: Any, token: str) -> int:
    return int(tokenizer.convert_tokens_to_ids(token))


def fast_tokenizer(backend: Tokenizer, **names: str) -> Any:
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=backend, **names)


@pytest.fixture(scope="module")
def smollm2(default_target_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(default_target_dir)


def byte_level_tokenizer() -> Any:
    """Every byte is a token; added tokens inside, outside and across the byte alphabet."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<é>"), AddedToken("日本"), AddedToken("a b"), AddedToken("\ufffd")])
    backend.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<tool>", special=True)])
    return fast_tokenizer(backend, eos_token="<end>")


def metaspace_tokenizer() -> Any:
    words = ["▁", "▁▁", "▁▁▁", "▁he", "llo", "▁hello", "▁日", "本", "x", ".", "▁\ufffd", "\ufffd", "<unk>"]
    backend = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=len(words) - 1))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return fast_tokenizer(backend, eos_token="</s>")


def byte_fallback_tokenizer() -> Any:
    """The decoder that SentencePiece models such as Llama 2 carry."""
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    words = ["<unk>", "▁", "▁▁", "▁hello", "▁日", "本", "x", "\ufffd"]
    vocabulary = {token: index for index, token in enumerate([*words, *byte_tokens])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return fast_tokenizer(backend, eos_token="</s>")


def wordpiece_tokenizer() -> Any:
    vocabulary = {word: index for index, word in enumerate(["[UNK]", "play", "##ing", "##s", ".", "don", "'", "t"])}
    backend = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return fast_tokenizer(backend, unk_token="[UNK]")


TOKENIZERS = {
    "byte level": byte_level_tokenizer(),
    "metaspace": metaspace_tokenizer(),
    "byte fallback": byte_fallback_tokenizer(),
    "wordpiece": wordpiece_tokenizer(),
}


@pytest.mark.parametrize("text", BREAKS_LENGTH_DIFFERENCES)
def test_texts_that_break_length_differences_stream_whole(smollm2: Any, text: str) -> None:
    ids = smollm2.encode(text)
    pieces = pieces_of(smollm2, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("text", BREAKS_LENGTH_DIFFERENCES)
def test_every_block_size_shows_a_growing_prefix(smollm2: Any, text: str, size: int) -> None:
    detokenizer = Detokenizer(smollm2)
    shown = ""
    ids = smollm2.encode(text)
    for start in range(0, len(ids), size):
        shown += "".join(detokenizer.push(token_id) for token_id in ids[start : start + size])
        assert text.startswith(shown)
    assert shown + detokenizer.flush() == text


def test_the_incomplete_tail_is_flushed_once(smollm2: Any) -> None:
    ids = smollm2.encode("hi🙂")[:-1]
    pieces = pieces_of(smollm2, ids)
    assert "".join(pieces[:-1]) == "hi"
    assert pieces[-1] == "\ufffd"
    assert "".join(pieces) == decode_all(smollm2, ids)


def test_a_mark_that_the_model_means_is_shown_at_once(smollm2: Any) -> None:
    ids = smollm2.encode("a\ufffdb")
    pieces = pieces_of(smollm2, ids)
    assert "".join(pieces) == "a\ufffdb"
    assert pieces[-2:] == ["b", ""]
    assert "".join(pieces_of(smollm2, smollm2.encode("\ufffd"))[:-1]) == "\ufffd"


def test_special_tokens_have_no_text_and_do_not_split_characters(smollm2: Any) -> None:
    ids = smollm2.encode("日")
    assert len(ids) > 1
    with_control = [0, ids[0], 1, *ids[1:], 2]
    assert "".join(pieces_of(smollm2, with_control)) == "日" == decode_all(smollm2, with_control)


@given(st.lists(st.integers(0, 49_151), max_size=40))
def test_random_ids_of_the_real_tokenizer(smollm2: Any, ids: list[int]) -> None:
    assert "".join(pieces_of(smollm2, ids)) == decode_all(smollm2, ids)


@given(st.text(max_size=30), st.data())
def test_random_texts_cut_anywhere(smollm2: Any, text: str, data: st.DataObject) -> None:
    ids = smollm2.encode(text)
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    assert "".join(pieces_of(smollm2, ids)) == decode_all(smollm2, ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_random_ids_of_every_kind_of_tokenizer(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 2), max_size=20))
    known = [token_id for token_id in ids if token_id < len(tokenizer)]
    assert "".join(pieces_of(tokenizer, ids)) == decode_all(tokenizer, known)


@given(st.binary(max_size=24))
def test_random_bytes_are_decoded_as_one_stream(data: bytes) -> None:
    for name in ("byte level", "byte fallback"):
        tokenizer = TOKENIZERS[name]
        first = id_of(tokenizer, "<0x00>") if name == "byte fallback" else None
        ids = [first + b for b in data] if first is not None else byte_level_ids(tokenizer, data)
        assert "".join(pieces_of(tokenizer, ids)) == decode_all(tokenizer, ids)


def byte_level_ids(tokenizer: Any, data: bytes) -> list[int]:
    printable = {ord(letter) for letter in pre_tokenizers.ByteLevel.alphabet() if ord(letter) < 256}
    others = [value for value in range(256) if value not in printable]
    letters = [chr(b) if b in printable else chr(256 + others.index(b)) for b in data]
    return [id_of(tokenizer, letter) for letter in letters]


def test_words_keep_their_spaces_without_byte_level() -> None:
    tokenizer = TOKENIZERS["metaspace"]
    ids = [id_of(tokenizer, token) for token in ("▁hello", "▁he", "llo", ".")]
    assert pieces_of(tokenizer, ids) == ["hello", " he", "llo", ".", ""]


def test_a_byte_fallback_character_comes_whole_and_a_bad_byte_takes_the_run_back() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    first = id_of(tokenizer, "<0x00>")
    emoji = [first + b for b in "🙂".encode()]
    word = id_of(tokenizer, "x")
    assert pieces_of(tokenizer, [*emoji, word]) == ["", "", "", "", "🙂x", ""]
    assert pieces_of(tokenizer, [*emoji, first + 0xFF, word])[-2:] == ["\ufffd" * 5 + "x", ""]


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_a_long_run_of_stray_bytes_costs_a_constant_per_token(name: str) -> None:
    """Counted in ids handed to decode, not in seconds."""
    tokenizer = _Counting(TOKENIZERS[name])
    stray = byte_level_ids(TOKENIZERS[name], b"\x80")[0] if name == "byte level" else 8 + 0x80
    ids = [stray] * 500
    assert "".join(pieces_of(tokenizer, ids)) == "\ufffd" * 500
    assert tokenizer.num_decoded <= 4 * len(ids)


class _Counting:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, token_ids: list[int], **options: bool) -> Any:
        self.num_decoded += len(token_ids)
        return self._tokenizer.decode(token_ids, **options)
